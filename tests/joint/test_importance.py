"""Importance within each type: against finite differences, by what a mask computes, and never across types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, make_tiny

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import deviation, uncached_logits
from lyapunov_prune.joint.importance import Importance, measure_importance, mixed, task_loss, taylor
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import wrap_any

FAMILIES = {"llama": "mean-gate", "gemma2": "scaled", "gpt2": "identity", "opt": "affine", "gpt_neox": "identity"}


def student(family: str, ids: torch.Tensor, dtype: torch.dtype = torch.float64, **changes: Any) -> Unmerged:
    model = make_tiny(family, **changes).to(dtype)
    return Unmerged(wrap_any(model), FAMILIES[family], lambda: uncached_logits(model, ids))


@pytest.fixture
def batch(ids: torch.Tensor) -> TokenBatch:
    return TokenBatch(ids, "ids", "calibration", bos=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_taylor_is_the_derivative_by_each_mask(family: str, ids: torch.Tensor, batch: TokenBatch) -> None:
    """Central differences in float64; the mask weighs the branch with the norms that its output alone goes through."""
    subject = student(family, ids)
    found = taylor(subject, batch, [[0], [2]])
    # An RMS norm computes in float32 whatever it is given: its rounding asks for larger steps.
    h, limit = (3e-3, 2e-3) if family in ("llama", "gemma2") else (1e-5, 1e-5)
    for kind, layer in ((0, 0), (0, 4), (1, 0), (1, 3)):
        losses = []
        for sign in (1, -1):
            m = torch.ones(2, len(subject.blocks), dtype=torch.float64)
            m[kind, layer] += sign * h
            with torch.no_grad(), mixed(subject, lambda m=m: m):
                losses.append(np.mean([float(task_loss(subject.model, batch, [item])) for item in (0, 2)]))
        assert found[kind, layer] == pytest.approx(abs(losses[0] - losses[1]) / (2 * h), rel=limit, abs=1e-9)
    assert (found > 0).all()
    assert hooks_of(subject.model) == 0


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_mask_of_zero_is_the_cut(family: str, ids: torch.Tensor) -> None:
    subject = student(family, ids)
    m = torch.ones(2, len(subject.blocks), dtype=torch.float64)
    m[0, 1] = m[1, 2] = m[1, 3] = 0
    dense = uncached_logits(subject.model, ids)
    with mixed(subject, lambda: m):
        logits = uncached_logits(subject.model, ids)
    with subject.cut((1,), (2, 3)) as model:
        assert deviation(logits, uncached_logits(model, ids)) < 1e-12
    with mixed(subject, lambda: torch.ones_like(m)):
        assert torch.equal(uncached_logits(subject.model, ids), dense)


def test_a_branch_that_does_nothing_goes_first(ids: torch.Tensor, batch: TokenBatch) -> None:
    subject = student("llama", ids, torch.float32)
    with torch.no_grad():
        subject.layers[2].self_attn.o_proj.weight.mul_(1e-4)
        subject.layers[4].mlp.down_proj.weight.mul_(1e-4)
    before = [p.clone() for p in subject.model.parameters()]
    assert measure_importance(subject, batch).first(1, 1) == ((2,), (4,))
    assert all(torch.equal(p, q) for p, q in zip(subject.model.parameters(), before, strict=True))
    assert all(p.requires_grad and p.grad is None for p in subject.model.parameters())


def test_types_are_ordered_apart_and_files_come_back(ids: torch.Tensor, batch: TokenBatch, tmp_path: Path) -> None:
    found = measure_importance(student("llama", ids, torch.float32), batch, batch=2)
    again = Importance.load(found.save(tmp_path / "importance.json"))
    assert again.first(6, 3) == found.first(6, 3)
    assert found.first(6, 0)[0] == tuple(np.argsort(found.attention))
    assert sorted(found.to_frame()["attention goes"]) == list(range(6))


def test_what_is_wrong_is_said(ids: torch.Tensor, batch: TokenBatch) -> None:
    subject = student("llama", ids, torch.float32)
    with torch.no_grad():
        subject.model.lm_head.weight[0] = torch.inf
    with pytest.raises(LyapunovPruneError, match="gradient of the loss"):
        measure_importance(subject, batch)
