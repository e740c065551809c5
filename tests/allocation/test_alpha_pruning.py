"""The tail exponent against samples of a known law, and the sparsities that follow it."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation.allocation import Allocation, Matrices
from lyapunov_prune.allocation.schedules.alpha_pruning import AlphaPruning, hill, tail_exponents
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections


def alpha_pruning(model: PreTrainedModel, budget: float, **options: Any) -> Allocation:
    return AlphaPruning(**options).allocate(model, budget)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 6.0])
def test_samples_of_a_power_law_give_its_exponent(alpha: float) -> None:
    """A density ∝ λ^−α is a Pareto law of index α − 1; the estimate of 1 / (α − 1) spreads as 1 / √k."""
    samples = scipy.stats.pareto(alpha - 1).rvs(40_000, random_state=0)
    np.testing.assert_allclose(hill(samples) - 1, alpha - 1, rtol=4 / math.sqrt(20_000))


@settings(max_examples=100)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=40), st.floats(1e-3, 1e3), st.randoms())
def test_the_estimate_is_that_of_the_formula(values: list[float], scale: float, order: Random) -> None:
    """Term by term, from the largest; it knows neither the order nor the scale."""
    n = len(values)
    k = n // 2
    down = sorted(values, reverse=True)
    total = math.fsum(math.log(down[i] / down[k]) for i in range(k))
    if total < 1e-6:
        return
    order.shuffle(values)
    assert math.isclose(hill(np.array(values)), 1 + k / total, rel_tol=1e-6)
    assert math.isclose(hill(scale * np.array(values)), 1 + k / total, rel_tol=1e-6)


@pytest.mark.parametrize("bad", [[], [1.0], [0.0, 0.0, 1.0, 2.0], [2.0, 2.0, 2.0], [1.0, math.inf], [math.nan, 1.0]])
def test_what_has_no_tail_is_refused(bad: list[float]) -> None:
    with pytest.raises(LyapunovPruneError, match="another schedule"):
        hill(np.array(bad))


def reference(model: PreTrainedModel) -> np.ndarray:
    """By the eigenvalues of the smaller Gram matrix, by numpy."""
    found: dict[int, list[float]] = {}
    for p in find_projections(wrap(model)):
        W = p.weight(model).double().numpy()
        W = W if W.shape[0] <= W.shape[1] else W.T
        down = np.linalg.eigvalsh(W @ W.T)[::-1]
        k = len(down) // 2
        found.setdefault(p.layer, []).append(1 + k / sum(math.log(down[i] / down[k]) for i in range(k)))
    return np.array([np.mean(found[layer]) for layer in sorted(found)])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_layer_of_lighter_tail_is_sparser_as_the_formula_says(name: str) -> None:
    model = make_tiny(name)
    matrices, alpha = Matrices.of(model), reference(model)
    np.testing.assert_allclose(tail_exponents(model, matrices), alpha[matrices.layers], rtol=1e-6)

    found = alpha_pruning(model, 0.5, tau=0.2)
    shape = 0.8 + 0.4 * (alpha - alpha.min()) / np.ptp(alpha)
    np.testing.assert_allclose(found.by_layer(), 0.5 * shape / shape.mean(), rtol=1e-6)
    assert abs(found.mean - 0.5) <= 1e-12
    assert found.by_layer().argmax() == alpha.argmax()


def test_tails_that_are_equal_give_equal_sparsities() -> None:
    model = make_tiny("llama")
    first = {p.component: p.weight(model) for p in find_projections(wrap(model)) if p.layer == 0}
    with torch.no_grad():
        for p in find_projections(wrap(model)):
            p.weight(model).copy_(first[p.component])
    assert np.ptp(alpha_pruning(model, 0.5).amount) < 1e-12


def test_a_matrix_that_is_mostly_rounding_is_refused_by_name() -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        weight = model.get_submodule("model.layers.2.mlp.up_proj").weight
        # Of rank one to the last digit; its other singular values come out as 1e-15 and less, not as zero.
        weight.copy_((9 * weight[:, :1]).round() @ (9 * weight[:1]).round())
    with pytest.raises(LyapunovPruneError, match=r"layers\.2\.mlp\.up_proj.*tail"):
        alpha_pruning(model, 0.5)


@pytest.mark.parametrize("tau", [-0.1, 1.0, math.nan])
def test_a_spread_outside_its_range_is_refused(llama: PreTrainedModel, tau: float) -> None:
    with pytest.raises(LyapunovPruneError, match="tau"):
        alpha_pruning(llama, 0.5, tau=tau)
