"""States that modules keep after a forward are forgotten."""

from __future__ import annotations

from typing import Any

import torch
from families.zoo import make_zoo

from lyapunov_prune.models.recurrence import forget_states
from lyapunov_prune.models.structure import find_structure

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_states_in_modules_are_forgotten() -> None:
    model = make_zoo("recurrent_gemma")
    block: Any = find_structure(model).layers[0]
    model(IDS, use_cache=True)
    assert block.temporal_block.rg_lru.recurrent_states is not None
    forget_states(find_structure(model))
    assert block.temporal_block.rg_lru.recurrent_states is None
    assert model(IDS, use_cache=False).logits.isfinite().all()
