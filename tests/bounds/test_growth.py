"""The bound in two phases: never above that in one, never below the error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lyapunov_prune.bounds.growth import two_phases
from lyapunov_prune.errors import LyapunovPruneError

LAYERS = st.lists(st.tuples(st.floats(0, 4), st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12)


@given(LAYERS, st.floats(0, 3))
def test_it_is_never_above_one_phase_and_never_below_the_error(
    layers: list[tuple[float, float, float]], start: float
) -> None:
    growth, local, _ = np.array(layers).T
    errors = [start]
    for G, delta, part in layers:  # an error that keeps the inequality, by any share of it
        errors.append(part * (G * errors[-1] + delta))
    found = two_phases(errors, growth, local)
    assert found.bound <= found.one_phase
    assert found.error <= found.bound * (1 + 1e-12)
    assert found.one_phase >= max(growth) ** len(growth) * start * (1 - 1e-12)


def test_it_is_the_formula_at_the_best_split() -> None:
    growth, local, errors = np.array([0.5, 0.4, 0.5, 2.0, 3.0]), np.full(5, 0.1), np.array([1.0, *[0.2] * 5])
    found = two_phases(errors, growth, local)
    sums = [sum(x**i for i in range(m)) for x, m in ((0.5, 3), (3.0, 2))]
    assert (found.split, found.before, found.behind, found.added) == (3, 0.5, 3.0, 0.1)
    assert found.bound == pytest.approx(9 * (0.125 + 0.1 * sums[0]) + 0.1 * sums[1])
    assert found.one_phase == pytest.approx(3**5 + 0.1 * sum(3.0**i for i in range(5)))
    assert "before layer 3" in found.line()
    assert "no less than in one" in two_phases([1, 1], [0.5], [0.5]).line()


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LyapunovPruneError):
        two_phases([1, 1], [1, 1], [1])
