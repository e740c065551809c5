"""ATP against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.schedules.atp import ATP, steepest
from lyapunov_prune.allocation.schedules.atp_search import ATPSearch
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap


def atp(model: PreTrainedModel, budget: float, **options: Any) -> Allocation:
    return ATP(**options).allocate(model, budget)


def atp_search(model: PreTrainedModel, budget: float, given: Any, **options: Any) -> Allocation:
    return ATPSearch(**options).allocate(model, budget, given)


@settings(max_examples=200)
@given(st.floats(0, 0.999), st.integers(2, 100))
def test_the_steepest_progression_ends_at_0_or_1(budget: float, layers: int) -> None:
    beta = steepest(budget, layers)
    ends = budget - beta * (layers - 1) / 2, budget + beta * (layers - 1) / 2
    assert -1e-12 <= ends[0] <= ends[1] <= 1 + 1e-12
    assert min(abs(ends[0]), abs(1 - ends[1])) <= 1e-12


@pytest.mark.parametrize(("budget", "beta"), [(0.5, 0.02), (0.7, 0.1), (0.3, 0.0)])
def test_layers_of_one_size_follow_the_formula(llama: PreTrainedModel, budget: float, beta: float) -> None:
    found = atp(llama, budget, beta=beta).by_layer()
    wanted = [budget - beta * (LAYERS - 1) / 2 + beta * layer for layer in range(LAYERS)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_without_a_difference_it_is_half_of_the_largest(llama: PreTrainedModel) -> None:
    found = atp(llama, 0.7)
    np.testing.assert_allclose(found.parameters["beta"], 0.5 * 0.6 / (LAYERS - 1))
    np.testing.assert_allclose(found.by_layer()[[0, -1]], [0.55, 0.85])


def test_a_layer_at_the_ceiling_lifts_the_others(llama: PreTrainedModel) -> None:
    found = atp(llama, 0.6, beta=steepest(0.6, LAYERS)).by_layer()
    np.testing.assert_allclose(found[-1], 0.99)
    np.testing.assert_allclose(found[:-1], [0.202, 0.362, 0.522, 0.682, 0.842])


def test_a_model_of_one_layer_has_no_progression() -> None:
    found = atp(make_tiny("llama", num_hidden_layers=1), 0.4)
    assert (found.amount == 0.4).all()
    assert found.parameters == {"beta": 0.0}


@pytest.mark.parametrize("beta", [-0.01, 0.2001, np.nan])
def test_a_difference_outside_its_range_is_refused(llama: PreTrainedModel, beta: float) -> None:
    with pytest.raises(LyapunovPruneError, match=r"beta.*(finite|0 to 0\.2)"):
        atp(llama, 0.5, beta=beta)


class Valley:
    """A score that is least where the last layer is `best` sparser than the first; a wreck beyond `end`."""

    def __init__(self, model: PreTrainedModel, best: float, end: float = np.inf) -> None:
        self.measured_on = read(wrap(model), torch.ones(2, 4, dtype=torch.int64)).measured_on()
        self.best, self.end = best, end
        self.asked: list[float] = []

    def __call__(self, allocation: Allocation) -> float:
        by_layer = allocation.by_layer()
        self.asked.append(by_layer[-1] - by_layer[0])
        return abs(self.asked[-1] - self.best) if self.asked[-1] < self.end else np.nan


@pytest.mark.parametrize("best", [0.1, 0.32, 0.55])
def test_the_search_takes_the_difference_of_least_loss(llama: PreTrainedModel, best: float) -> None:
    score = Valley(llama, best)
    found = atp_search(llama, 0.4, score, trials=10)
    grid = steepest(0.4, LAYERS) * np.arange(1, 11) / 10
    np.testing.assert_allclose(score.asked, grid * (LAYERS - 1))
    wanted = grid[np.argmin(np.abs(grid * (LAYERS - 1) - best))]
    assert found.parameters == {"trials": 10, "beta": pytest.approx(wanted)}
    np.testing.assert_array_equal(found.amount, atp(llama, 0.4, beta=float(found.parameters["beta"])).amount)
    assert (found.schedule, found.measured_on) == ("atp-search", (score.measured_on,))
    np.testing.assert_allclose(found.tried, list(zip(grid, np.abs(grid * (LAYERS - 1) - best), strict=True)), atol=1e-9)


def test_wrecks_do_not_win_the_search(llama: PreTrainedModel) -> None:
    assert atp_search(llama, 0.5, Valley(llama, 1.0, end=0.45), trials=5).parameters["beta"] == pytest.approx(0.08)
    with pytest.raises(LyapunovPruneError, match=r"sparsity 0\.5"):
        atp_search(llama, 0.5, Valley(llama, 1.0, end=0.0))
    for trials in (0, 2.5):
        with pytest.raises(LyapunovPruneError, match="trials of atp-search"):
            atp_search(llama, 0.5, Valley(llama, 1.0), trials=trials)


def test_where_no_difference_is_left_one_trial_is_enough(llama: PreTrainedModel) -> None:
    score = Valley(llama, 0.5)
    assert atp_search(llama, 0.0, score).parameters == {"trials": 9, "beta": 0.0}
    assert len(score.asked) == 1
