"""One choice for each: nothing that fits costs less."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.allocation.knapsack import cheapest
from lyapunov_prune.errors import LyapunovPruneError


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.floats(0, 1))
def test_no_other_choices_that_fit_cost_less(seed: int, things: int, spare: float) -> None:
    rng = np.random.default_rng(seed)
    cost, weight = rng.lognormal(-5, 4, (things, 4)), rng.integers(1, 10**9, (things, 4)).astype(float)
    cost[:, 1:][rng.random((things, 3)) < 0.3] = np.inf
    rows, allowed = np.arange(things), np.where(np.isfinite(cost), weight, np.inf)
    budget = allowed.min(1).sum() + spare * weight.sum()
    picks = np.array([*itertools.product(range(4), repeat=things)])
    within = weight[rows, picks].sum(1) <= budget
    best = cost[rows, picks].sum(1)[within].min()
    found = cheapest(cost, weight, budget)
    assert weight[rows, found].sum() <= budget * (1 + 1e-9)
    assert cost[rows, found].sum() <= best * (1 + 1e-6)


def test_less_than_the_lightest_is_refused() -> None:
    with pytest.raises(LyapunovPruneError):
        cheapest(np.ones((2, 2)), np.array([[3.0, 4.0], [1.0, 9.0]]), 3.9)
