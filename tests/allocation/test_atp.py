"""ATP against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import LAYERS, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.schedules.atp import ATP, steepest


def atp(model: PreTrainedModel, budget: float, **options: Any) -> Allocation:
    return ATP(**options).allocate(model, budget)


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
