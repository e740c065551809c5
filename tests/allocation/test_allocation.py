"""The arithmetic of budgets against its definition, and the object that carries an allocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation import Allocation
from lyapunov_prune.allocation.allocation import Matrices
from lyapunov_prune.allocation.fitting import fit, shift
from lyapunov_prune.allocation.schedules.atp import ATP
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections

Case = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def mean(amount: np.ndarray, sizes: np.ndarray) -> float:
    """Weighted by size, in exact arithmetic."""
    total = sum(Fraction(float(a)) * int(n) for a, n in zip(amount, sizes, strict=True))
    return float(total / int(sizes.sum()))


@st.composite
def cases(draw: st.DrawFn, negative: bool = False) -> Case:
    """Targets, sizes and bounds of 1 to 12 matrices; bounds for all or for each."""
    count = draw(st.integers(1, 12))
    positive = st.just(0.0) | st.floats(1e-6, 1e6)
    values = st.floats(-3, 3) if negative else positive
    target = np.array(draw(st.lists(values, min_size=count, max_size=count)))
    sizes = np.array(draw(st.lists(st.integers(1, 10**9), min_size=count, max_size=count)))
    bound = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(1e-3, 1)
    bounds = st.tuples(bound, bound).map(sorted)
    if draw(st.booleans()):
        low, high = np.array(draw(st.lists(bounds, min_size=count, max_size=count))).T
    else:
        one = draw(bounds)
        low, high = np.full(count, one[0]), np.full(count, one[1])
    return target, sizes, 0 * low if negative else low, high


def allocated(function: Callable[..., np.ndarray], budget: float, case: Case) -> np.ndarray:
    """What is shifted is bounded from below by 0."""
    target, sizes, low, high = case
    return fit(target, sizes, budget, low, high) if function is fit else shift(target, sizes, budget, high)


def attainable(function: Callable[..., np.ndarray], case: Case) -> tuple[float, float]:
    target, sizes, low, high = case
    reached = np.where(target > 0, high, np.clip(0, low, high)) if function is fit else high
    return mean(low, sizes), mean(reached, sizes)


BOTH = pytest.mark.parametrize(("function", "negative"), [(fit, False), (shift, True)], ids=["fit", "shift"])


@BOTH
@settings(max_examples=100)
@given(data=st.data(), place=st.floats(0, 1))
def test_the_budget_is_met_within_the_bounds_in_the_order_of_the_targets(
    function: Callable[..., np.ndarray], negative: bool, data: st.DataObject, place: float
) -> None:
    case = data.draw(cases(negative))
    target, sizes, low, high = case
    least, most = attainable(function, case)
    budget = least + place * (most - least)
    found = allocated(function, budget, case)
    assert abs(mean(found, sizes) - budget) <= 1e-12
    assert (low <= found).all()
    assert (found <= high).all()
    for i in range(len(target)):
        alike = (low == low[i]) & (high == high[i]) & (target >= target[i])
        assert (found[alike] >= found[i]).all()
    free = (low < found) & (found < high)
    if free.sum() > 1:  # one factor, or one step, for all
        moved = found[free] / target[free] if function is fit else found[free] - target[free]
        np.testing.assert_allclose(moved, moved[0], rtol=1e-9, atol=1e-9 * (function is shift))
    np.testing.assert_allclose(allocated(function, budget, (found, sizes, low, high)), found, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "target", "sizes", "low", "high"),
    [
        (fit, [0.34, 102876.0, 163163.0], [944144023, 1, 32], [0.5, 0, 0], [0.5, 1, 0]),
        (shift, [0.25, 1.0], [944144023, 1], [0.0, 0.0], [0.5, 1.0]),
    ],
    ids=["fit", "shift"],
)
def test_a_small_matrix_beside_a_large_one_at_its_bound_stays_when_fitted_again(
    function: Callable[..., np.ndarray], target: list[float], sizes: list[int], low: list[float], high: list[float]
) -> None:
    """A rounding unit of the mean is 10⁻⁷ of its amount."""
    n, a, b = np.array(sizes), np.array(low), np.array(high)
    least, most = attainable(function, (np.array(target), n, a, b))
    for place in np.linspace(0, 1, 101):
        budget = least + place * (most - least)
        found = allocated(function, budget, (np.array(target), n, a, b))
        assert abs(mean(found, n) - budget) <= 1e-12
        np.testing.assert_allclose(allocated(function, budget, (found, n, a, b)), found, atol=1e-12)


@BOTH
@settings(max_examples=100)
@given(data=st.data(), beyond=st.floats(1e-6, 2), below=st.booleans())
def test_a_budget_out_of_reach_is_refused(
    function: Callable[..., np.ndarray], negative: bool, data: st.DataObject, beyond: float, below: bool
) -> None:
    case = data.draw(cases(negative))
    least, most = attainable(function, case)
    budget = least - beyond if below else most + beyond
    with pytest.raises(LyapunovPruneError, match=f"reaches {least:.6g} to {most:.6g}"):
        allocated(function, budget, case)


def test_a_case_by_hand() -> None:
    """c · (1, 2, 4) with the last at its bound: (0.25 + 0.5 + 0.75) / 3."""
    sizes = np.ones(3)
    np.testing.assert_allclose(fit(np.array([1, 2, 4]), sizes, 0.5, high=0.75), [0.25, 0.5, 0.75])
    np.testing.assert_allclose(shift(np.array([0, 1, -1]), sizes, 0.5), [0.5, 1, 0])
    np.testing.assert_allclose(shift(np.array([0, 0.1]), np.array([3, 1]), 0.3), [0.275, 0.375])


def test_a_budget_without_digits_is_none() -> None:
    assert fit(np.array([514942.0, 0.0625]), np.ones(2), 1e-309).tolist() == [0, 0]
    assert fit(np.array([1.0, 3.0]), np.ones(2), 1e-280).tolist() == pytest.approx([5e-281, 1.5e-280])


def test_targets_up_to_the_span_are_fitted_and_beyond_it_refused() -> None:
    target, sizes = np.array([1e-150, 1e-280, 1.0]) * 1e20, np.array([5, 7, 1])
    np.testing.assert_allclose(fit(target, sizes, 12 / 13), [1, 6 / 7, 1])
    with pytest.raises(LyapunovPruneError, match="too far apart"):
        fit(np.array([1e-300, 1.0]), np.ones(2), 0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_targets_without_sense_are_refused(bad: float) -> None:
    with pytest.raises(LyapunovPruneError):
        fit(np.array([1.0, bad]), np.ones(2), 0.5)
    if bad != -1:
        with pytest.raises(LyapunovPruneError):
            shift(np.array([1.0, bad]), np.ones(2), 0.5)


def test_bounds_that_cross_and_budgets_that_are_no_number_are_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="lower bound"):
        fit(np.ones(2), np.ones(2), 0.5, low=0.6, high=0.4)
    with pytest.raises(LyapunovPruneError, match="mean nan"):
        fit(np.ones(2), np.ones(2), np.nan)


@pytest.mark.parametrize("budget", [-0.1, 1.0, 1.5, np.nan])
def test_a_sparsity_outside_its_range_is_refused(llama: PreTrainedModel, budget: float) -> None:
    with pytest.raises(LyapunovPruneError):
        lp.allocate(llama, "uniform", budget)


# The object.


@pytest.fixture
def allocation(llama: PreTrainedModel) -> Allocation:
    return ATP().allocate(llama, 0.5)


def test_matrices_are_those_of_the_model(llama: PreTrainedModel) -> None:
    matrices = Matrices.of(llama)
    assert matrices.sizes.sum() == sum(p.weight(llama).numel() for p in find_projections(wrap(llama)))
    found = matrices.layer_sum(matrices.sizes)
    for i, layer in enumerate(matrices.layers):
        assert found[i] == sum(n for n, k in zip(matrices.sizes, matrices.layers, strict=True) if k == layer)


def test_an_allocation_answers_by_matrix_and_by_layer(allocation: Allocation) -> None:
    amount = np.linspace(0, 1, len(allocation.names))  # another for every matrix of a layer
    allocation = dataclasses.replace(allocation, amount=amount)
    name = "model.layers.3.mlp.up_proj"
    assert allocation.of(name) == allocation.amount[allocation.names.index(name)]
    for layer, value in enumerate(allocation.by_layer()):
        inside = np.array(allocation.layers) == layer
        sizes = np.array(allocation.sizes)[inside]
        np.testing.assert_allclose(value, mean(allocation.amount[inside], sizes), rtol=1e-14)
    with pytest.raises(LyapunovPruneError, match="matrix 'lm_head'"):
        allocation.of("lm_head")


def test_the_mean_counts_entries_not_matrices(allocation: Allocation) -> None:
    amount = np.where(np.array(allocation.sizes) == max(allocation.sizes), 0.75, 0.25)
    large = sum(size for size in allocation.sizes if size == max(allocation.sizes))
    assert dataclasses.replace(allocation, amount=amount).mean == pytest.approx(
        (0.75 * large + 0.25 * (sum(allocation.sizes) - large)) / sum(allocation.sizes), rel=1e-14
    )


def test_a_layer_without_matrices_has_no_mean(allocation: Allocation) -> None:
    last = max(allocation.layers)
    model = dataclasses.replace(allocation.model, num_layers=last + 2)
    found = dataclasses.replace(allocation, model=model).by_layer()
    np.testing.assert_array_equal(found[:-1], allocation.by_layer())
    assert np.isnan(found[-1])


def test_it_prints_a_row_a_layer_and_frames_a_row_a_matrix(allocation: Allocation) -> None:
    frame, lines = allocation.to_frame(), str(allocation).splitlines()
    assert list(frame) == ["layer", "matrix", "entries", "sparsity"]
    assert len(frame) == len(allocation.names) == 42
    assert lines[0].startswith("atp, beta 0.1: sparsity 0.5 over ")
    assert lines[1].split() == ["layer", "entries", "sparsity", "least", "most"]
    assert [line.split()[0] for line in lines[2:]] == list("012345")
    assert lines[2].split()[2:] == ["0.25", "0.25", "0.25"]
