"""Of the sizes that were tried the smallest good one is taken."""

from __future__ import annotations

import itertools

import pytest
from helpers.results import example

from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.worth import Ratio


@pytest.mark.parametrize(
    ("highs", "taken"), [((1.01, 1.1, 1.2), "b"), ((1.01, float("nan"), 1.05), "c"), ((1.2, 2, 3), None)]
)
def test_the_smallest_good_one_is_taken(highs: tuple[float, ...], taken: str | None) -> None:
    rows = [(name, size, Ratio(1, 1, high)) for name, size, high in zip("abc", (3, 2, 1), highs, strict=True)]
    found = SizesTried.of(rows[::-1], example(MeasuredOn, itertools.repeat(0.5)))
    assert found.names == ("a", "b", "c")
    assert (None if found.taken is None else found.names[found.taken]) == taken
    assert found.to_frame().taken.sum() == (taken is not None)
