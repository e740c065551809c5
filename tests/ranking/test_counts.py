"""How many can be removed."""

from __future__ import annotations

import pytest

from lyapunov_prune.ranking.counts import least_count, most_not_over


@pytest.mark.parametrize("most", [1, 2, 7, 29])
def test_least_finds_the_first_that_holds_from_anywhere(most: int) -> None:
    for wanted in range(1, most + 1):
        for first in range(most + 3):
            asked: list[int] = []

            def holds(count: int, wanted: int = wanted, asked: list[int] = asked) -> bool:
                asked.append(count)
                return count >= wanted

            assert least_count(holds, most, first) == wanted
            assert len(asked) == len(set(asked))
            assert all(0 < count < most for count in asked)


@pytest.mark.parametrize("most", [1, 2, 7, 29])
def test_the_most_that_is_not_over(most: int) -> None:
    for wanted in range(most + 1):
        assert most_not_over(lambda count, wanted=wanted: count > wanted, most) == wanted  # type: ignore[misc]
