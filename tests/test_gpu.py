"""On a GPU the numbers are those of the CPU, up to rounding. Skipped where there is none."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from healing.test_heal import pair
from helpers import make_tiny
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.predictions.divergence import skip_divergence
from lyapunov_prune.sensitivity.sweep import Job, Sweep

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU here")]


@pytest.fixture
def both(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model: Any = make_tiny(family).double()
    return model, copy.deepcopy(model).to(DEVICE)


def test_measurements(both: tuple[PreTrainedModel, PreTrainedModel], ids: torch.Tensor) -> None:
    def measured(model: PreTrainedModel) -> list[np.ndarray]:
        divergence = skip_divergence(model, ids)
        return [
            lp.measure_contraction(model, ids).rho,
            lp.block_influence(model, ids).influence,
            divergence.kl,
            divergence.variance,
            lp.perplexity(model, ids).windows,
        ]

    for there, here in zip(*map(measured, both), strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-3, atol=1e-9)


def test_a_sweep(both: tuple[PreTrainedModel, PreTrainedModel], ids: torch.Tensor) -> None:
    def losses(model: PreTrainedModel) -> list[np.ndarray]:
        outcomes = Sweep(model, ids).run([Job(str(layer), layer, remove=(layer,)) for layer in range(3)])
        return [outcome.windows for outcome in outcomes.values()]

    np.testing.assert_allclose(*map(losses, both), rtol=1e-4)


def test_removal_and_its_gate(both: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    there, here = (lp.remove_layers(model, [1, 3]) for model in both)
    assert all(torch.equal(p, q.cpu()) for p, q in zip(there.parameters(), here.parameters(), strict=True))
    assert lp.verify_removal(both[1], here, [1, 3]).passed


def test_compression(both: tuple[PreTrainedModel, PreTrainedModel], ids: torch.Tensor) -> None:
    there, here = (lp.compress(model, ids, method="wanda", sparsity=0.5).model for model in both)
    zeros = [torch.cat([(p == 0).flatten().cpu() for p in model.parameters()]) for model in (there, here)]
    assert (zeros[0] == zeros[1]).double().mean() > 0.999


@pytest.mark.parametrize("rank", [None, 2])
def test_healing(rank: int | None, ids: torch.Tensor) -> None:
    def losses(device: str) -> np.ndarray:
        student, teacher = (model.to(device) for model in pair())
        return heal(student, teacher, ids.repeat(3, 1), steps=5, rank=rank).report.losses

    np.testing.assert_allclose(losses("cpu"), losses(DEVICE), rtol=1e-3)
