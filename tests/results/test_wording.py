"""Lists of layers and bars."""

from __future__ import annotations

import numpy as np
import pytest

from lyapunov_prune.results.wording import bars, between, ranges


@pytest.mark.parametrize(
    ("layers", "told"),
    [((), "none"), ((3,), "3"), ((4, 3), "3, 4"), ((22, 0, 26, 24, 25), "0, 22, 24–26")],
    ids=str,
)
def test_runs_of_layers_are_joined(layers: tuple[int, ...], told: str) -> None:
    assert ranges(layers) == told


def test_there_is_a_bar_a_layer_and_the_largest_is_the_tallest() -> None:
    drawn = bars(np.array([1e-3, 1.0, np.nan, *[0.03] * 9]))
    assert drawn.startswith("0 ▁█·")
    blocks = drawn.replace("0 ", "", 1).replace(" 10 ", "")
    assert len(blocks) == 12
    assert bars(np.array([-1.0, 0.0, 1.0])) == "0 ▁▅█"  # linear, as one is not above 0
    assert bars(np.array([2.0, 2.0])) == "0 ▁▁"


def test_too_few_windows_have_no_interval() -> None:
    assert "1.2 to 1.4" in between(1.2, 1.4)
    assert "no interval" in between(float("nan"), 1.4)
