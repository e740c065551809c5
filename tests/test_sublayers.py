"""Attention or MLP alone: every listed family passes the gate, and every fault that is planted fails it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LAYERS, TINY, make_tiny
from test_branches import PARALLEL, branches_of, make_other
from test_cli import run
from test_tracing import hooks_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune import (
    LayerRanking,
    LyapunovPruneError,
    PruningPlan,
    drop_sublayers,
    rank_sublayers,
    remove_layers,
    sublayer_influence,
    verify_removal,
)
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.sublayers import find_sublayers, silenced


@pytest.mark.parametrize("layers", [(2,), (0, LAYERS - 1)], ids=str)
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_passes_the_gate(family: str, kind: str, layers: tuple[int, ...], ids: torch.Tensor) -> None:
    model = make_tiny(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    pruned = drop_sublayers(model, **{kind: layers})
    plan = PruningPlan.given(model, **{f"drop_{kind}": layers})
    report = verify_removal(model, pruned, plan, ids)
    assert report.passed, f"\n{report}"
    assert hooks_of(model) == hooks_of(pruned) == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    changed = {name for name, p in pruned.named_parameters() if not torch.equal(p, before[name])}
    path = find_structure(model).layers_path
    assert {int(name.removeprefix(f"{path}.").split(".")[0]) for name in changed} == set(layers)
    assert len(changed) == len(layers) * (1 + any(name.endswith("bias") for name in changed))
