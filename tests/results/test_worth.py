"""The words for a ratio of perplexities follow its interval."""

from __future__ import annotations

import math

import pytest

from lyapunov_prune.results.worth import Ratio


@pytest.mark.parametrize(
    ("low", "high", "word", "is_good"),
    [
        (0.9, 0.99, "Good", True),
        (0.98, 1.02, "Good", True),
        (1.05, 1.1, "Good", True),
        (1.05, 1.11, "Costly", False),
        (1.2, 2.0, "Costly", False),
        (1.05, 2.1, "Do not use", False),
        (3.0, 1e9, "Do not use", False),
        (1.0, math.inf, "Do not use", False),
        (math.nan, math.nan, "Not certain", False),
    ],
)
def test_the_upper_end_decides(low: float, high: float, word: str, is_good: bool) -> None:
    found = Ratio(1.0, low, high)
    assert found.means().startswith(word)
    assert found.is_good is is_good
    assert ("wide" in found.means()) is (word in ("Costly", "Do not use") and low <= 1.1)
