"""Reallocation within layers: every layer keeps its amount, and who gives and who takes is as each scheme says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import LAYERS, inputs_of, make_tiny, profile_of
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, allocate
from lyapunov_prune.allocation import within as module
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.within import component_importance, constrained_threshold, sensitivity_guided
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.projections import find_projections


@pytest.fixture
def regrets(llama: PreTrainedModel, ids: torch.Tensor) -> Any:
    """The later a component stands in its layer the worse, but for the first, whose loss is no number."""
    on = read(llama, ids).measured_on()
    components = list(dict.fromkeys(p.component for p in find_projections(llama)))
    values = [np.nan, *(10.0**k for k in range(1, len(components)))]
    group = [(k, c, -v if k == 3 else v) for k in range(LAYERS) for c, v in zip(components, values, strict=True)]
    frames = {
        "group": pd.DataFrame(group, columns=["layer", "component", "regret"]),
        "component": pd.DataFrame({"component": components, "regret": values}),
    }
    return SimpleNamespace(measured_on=on, calibrated_on=None, of=frames.__getitem__)


def test_every_layer_keeps_its_amount(llama: PreTrainedModel, ids: torch.Tensor, regrets: Any) -> None:
    for before in (allocate(llama, "atp", 0.6), allocate(llama, "uniform", 0.95), allocate(llama, "uniform", 0.0)):
        for after in (
            sensitivity_guided(llama, before, regrets, strength=0.3),
            component_importance(llama, before, regrets, strength=0.3),
            constrained_threshold(llama, before, ids, most_off=0.3),
        ):
            np.testing.assert_allclose(after.by_layer(), before.by_layer(), atol=1e-12)
            assert (after.amount >= 0).all()
            assert (after.amount <= 0.99).all()
            assert (after.amount != before.amount).any() == (before.mean > 0)
            assert after.measured_on[-1].model.same_as(before.model)


def test_the_costlier_group_stays_denser(llama: PreTrainedModel, regrets: Any) -> None:
    """Over 0.12 in all, by even steps: the scale of the regrets plays no part, and NaN is the worst."""
    before = allocate(llama, "uniform", 0.5)
    by_component = component_importance(llama, before, regrets, strength=0.12).amount.reshape(LAYERS, -1)
    by_group = sensitivity_guided(llama, before, regrets, strength=0.12).amount.reshape(LAYERS, -1)
    worst_first = by_component[0] - by_component[0, 0]
    np.testing.assert_allclose(worst_first, [0, *(0.12 - 0.02 * k for k in range(6))], atol=1e-12)
    np.testing.assert_allclose(by_component, np.tile(by_component[0], (LAYERS, 1)), atol=1e-12)
    np.testing.assert_allclose(by_group[[0, 1, 2, 4, 5]], by_component[[0, 1, 2, 4, 5]], atol=1e-12)
    np.testing.assert_allclose(by_group[3] - by_group[3, 0], [0, *(0.02 + 0.02 * k for k in range(6))], atol=1e-12)


@pytest.mark.parametrize("most_off", [1.0, 0.05])
def test_one_threshold_cuts_all_matrices_of_a_layer(llama: PreTrainedModel, ids: torch.Tensor, most_off: float) -> None:
    """Against the least scores of the whole layer, sorted in float64."""
    found = constrained_threshold(llama, allocate(llama, "uniform", 0.5), ids, most_off=most_off)
    inputs = inputs_of(llama, ids)
    for layer in range(LAYERS):
        here = [p for p in find_projections(llama) if p.layer == layer]
        scores = [p.weight(llama).double().abs() * inputs[p.module].square().sum(0).sqrt() for p in here]
        limit = torch.cat([s.flatten() for s in scores]).quantile(0.5)
        wanted = np.array([float((s < limit).double().mean()) for s in scores])
        got = np.array([found.of(p.name) for p in here])
        if most_off == 1.0:
            np.testing.assert_allclose(got, wanted, atol=2e-3)
        else:
            assert np.abs(got - 0.5).max() == pytest.approx(0.05, abs=1e-9)
            assert np.abs(wanted - 0.5).max() > 0.1


def test_what_does_not_fit_is_refused(llama: PreTrainedModel, ids: torch.Tensor, regrets: Any) -> None:
    even = allocate(llama, "uniform", 0.5)
    other = make_tiny("llama", seed=1)
    schemes: tuple[Callable[[PreTrainedModel, Allocation], Allocation], ...] = (
        lambda m, a: sensitivity_guided(m, a, regrets),
        lambda m, a: constrained_threshold(m, a, ids),
    )
    for scheme in schemes:
        with pytest.raises(LyapunovPruneError, match="allocate for this model anew"):
            scheme(other, even)
        with pytest.raises(LyapunovPruneError, match="give an allocation of sparsity"):
            scheme(llama, allocate(llama, "bits", 6.0, profile=profile_of(llama)))
    with pytest.raises(LyapunovPruneError, match="give an allocation of sparsity and a number of 0 or more"):
        sensitivity_guided(llama, even, regrets, strength=-0.1)
    with pytest.raises(LyapunovPruneError, match="the regrets are of"):
        sensitivity_guided(other, allocate(other, "uniform", 0.5), regrets)
    less = SimpleNamespace(**{**vars(regrets), "of": lambda study: regrets.of(study)[1:]})
    with pytest.raises(LyapunovPruneError, match=r"no regret of .*layers\.0\.self_attn\.q_proj; run the study"):
        component_importance(llama, even, less)


def test_planted_fault_a_layer_that_pays_for_another_is_seen(
    llama: PreTrainedModel, regrets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module.shift
    monkeypatch.setattr(module, "shift", lambda target, sizes, mean, **bounds: right(target, sizes, mean / 2, **bounds))
    before = allocate(llama, "uniform", 0.5)
    assert not np.allclose(sensitivity_guided(llama, before, regrets).by_layer(), before.by_layer(), atol=1e-12)
