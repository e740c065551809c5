"""Which pairs are recovered: one more part a point, from a point that was there before, enough for every degree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lyapunov_prune.joint import fit_map
from lyapunov_prune.joint.chains import CHAINS, DENSE, chains, rivals, walk


@given(reach=st.integers(1, 12), a=st.integers(0, 6), g=st.integers(1, 6))
def test_every_point_has_one_part_less_than_the_next(reach: int, a: int, g: int) -> None:
    parents = chains(reach, (a, g))
    before = {DENSE}
    for point, parent in parents.items():
        assert parent in before
        assert sorted(np.subtract(point, parent).tolist()) == [0, 1]
        assert point <= (a, g) or point[0] <= a
        assert point[1] <= g
        assert sum(point) <= reach
        before.add(point)
    assert {(n, 0) for n in range(1, min(reach, a) + 1)} <= parents.keys()
    assert {(0, n) for n in range(1, min(reach, g) + 1)} <= parents.keys()


def test_eight_parts_give_28_points_and_every_degree_a_try() -> None:
    points = list(chains(8, (29, 30)))
    assert len(points) == 28
    scores = np.random.default_rng(0).normal(size=28)
    assert list(fit_map((np.array(points) / 30).tolist(), scores.tolist()).errors) == [1, 2, 3, 4]
    assert [walk(chain, 8, (29, 30))[-1] for chain in CHAINS] == [(8, 0), (0, 8), (6, 2), (2, 6)]


def test_planted_fault_points_on_three_lines_lose_a_degree() -> None:
    """Both axes and the diagonal: a polynomial of degree three vanishes on all of them."""
    lines = [*((n, 0) for n in range(1, 9)), *((0, n) for n in range(1, 9)), *((n, n) for n in range(1, 9))]
    excluded = fit_map((np.array(lines) / 30).tolist(), list(range(24))).excluded
    assert set(excluded) == {3, 4}
    assert "all 24 points determine 9 of 10 coefficients" in excluded[3]


@pytest.mark.parametrize("remove", [1, 3, 8])
def test_rivals_lie_in_the_budget(remove: int) -> None:
    allowed = {(n, remove - n) for n in range(remove + 1)}
    found = rivals(8, (29, 30), allowed)
    assert set(found) <= allowed
    assert {(remove, 0), (0, remove)} <= set(found)
