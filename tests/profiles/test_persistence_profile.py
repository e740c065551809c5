"""What a measured persistence says: rates and half-lives of known curves, saving, and the words of the answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.results import example

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.profiles import PersistenceProfile
from lyapunov_prune.results.result import LINES

K = np.arange(65)


def profile(left: np.ndarray, *, convolution: bool = False, floor: float = 0.0) -> PersistenceProfile:
    """Two layers of five: one that halves every ten tokens, and one that leaves `left`."""
    curves = np.stack([0.5 ** (K / 10), left])
    made: PersistenceProfile = example(PersistenceProfile, itertools.cycle([0.25]))
    return replace(
        made,
        layers=(1, 4),
        convolution=(False, convolution),
        left=curves,
        interval=np.stack([0.9 * curves, 1.1 * curves], -1),
        floor=np.full((2, 65), floor),
        bound=curves,
        output=np.zeros((2, 64)),
        kl=np.stack([np.full(64, 0.5), np.zeros(64)]),
    )


def test_a_constant_decay_is_its_rate_and_half_life() -> None:
    found = profile(0.9**K)
    assert found.rho == pytest.approx([0.5**0.1, 0.9])
    assert found.half_life == pytest.approx([10, np.log(0.5) / np.log(0.9)])
    low, high = found.half_life_interval[1]
    assert (low, high) == pytest.approx([np.log(0.5 / 0.9) / np.log(0.9), np.log(0.5 / 1.1) / np.log(0.9)])
    assert found.order == [0, 1]


def test_what_is_below_rounding_does_not_count() -> None:
    found = profile(np.maximum(0.5**K, 1e-4), floor=1e-4)
    assert found.reached.tolist() == [64, 9]  # 0.5^9 is above ten times the floor, 0.5^10 is not
    assert found.rho[1] == pytest.approx(0.5)


def test_an_error_that_stays_has_no_half_life() -> None:
    found = profile(np.where(K > 0, 0.8, 1.0))
    assert found.half_life[1] == np.inf
    assert "layer 4: half of it for more than 64 tokens" in found.answer()[0]
    assert found.order == [1, 0]


def test_a_convolution_is_gone_after_its_width() -> None:
    found = profile(np.where(K < 3, np.sqrt((3 - K.clip(max=3)) / 3), 0.0), convolution=True)
    assert found.rho[1] == 0
    assert any("an error is gone after 3" in line for line in found.answer())
    assert sum("lasts" in line for line in found.answer()) == 1


def test_the_answer_is_short_and_survives_saving(tmp_path: Path) -> None:
    found = profile(0.9**K)
    assert len(found.answer()) <= LINES
    again = PersistenceProfile.load(found.save(tmp_path / "persistence.json"))
    assert str(again) == str(found)
    assert set(found.plot()) == {"persistence", "left"}
    assert found.to_frame().sqrt_rho_depth.tolist() == pytest.approx(np.sqrt(found.depth.rho[[1, 4]]))


def test_curves_that_cannot_be_are_refused() -> None:
    found = profile(0.9**K)
    for wrong in ({"left": found.left / 2}, {"layers": ()}, {"layers": (1, 5)}, {"bound": found.bound[:, 1:]}):
        with pytest.raises(LyapunovPruneError, match="persistence profile"):
            replace(found, **wrong)  # type: ignore[arg-type]
