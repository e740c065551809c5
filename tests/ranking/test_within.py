"""As many channels or experts go as a divergence on other windows allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_mixture, make_tiny

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.ranking.within import most_within

IDS = torch.randint(97, (6, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "what", "max_kl", "counts"),
    [
        (make_tiny("llama"), "width", 0.08, range(8, 48, 8)),
        (make_tiny("gpt2"), "width", 1e9, range(8, 128, 8)),
        (make_mixture("qwen3_moe"), "experts", 0.05, range(1, 7)),
        (make_mixture("deepseek_v3"), "experts", 1e9, range(2, 5, 2)),
    ],
)
def test_the_largest_number_within(model: Any, what: str, max_kl: float, counts: range) -> None:
    found = most_within(model, IDS, what, max_kl)
    goes = found.to_frame()["channels" if what == "width" else "experts"].tolist()
    within = found.kl.mean(1) <= max_kl
    assert set(goes) <= set(counts)
    assert found.chosen == np.flatnonzero(within)[-1]
    if within.all():
        assert goes[-1] == counts[-1]
    else:  # the next number is over
        assert goes[found.chosen + 1] == goes[found.chosen] + counts.step
    assert found.plan().measured_on == (*found.plans[found.chosen].measured_on, found.measured_on)


@pytest.mark.parametrize(
    ("what", "max_kl", "said"),
    [
        ("width", 1e-9, "no width can be removed"),
        ("layers", 0.1, "layers"),
        ("experts", 0.1, "LlamaModel has experts"),
        ("width", 0.0, "max_kl"),
    ],
)
def test_what_cannot_be_is_refused(what: str, max_kl: float, said: str) -> None:
    with pytest.raises(LyapunovPruneError, match=said):
        most_within(make_tiny("llama"), IDS, what, max_kl)
