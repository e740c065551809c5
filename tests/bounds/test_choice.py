"""A noisy predictor's choice: certain only where it cannot be wrong, and never dearer than twice the noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lyapunov_prune.bounds.choice import argmax_of_noise_lt_half_gap, regret_of_argmax_le
from lyapunov_prune.errors import LyapunovPruneError

truths = arrays(np.float64, st.integers(1, 9), elements=st.floats(-100, 100))


@settings(max_examples=400)
@given(p=truths, noise=st.floats(0, 50), seed=st.integers(0, 2**32 - 1), bias=st.floats(-1e3, 1e3))
def test_no_predictor_within_the_noise_breaks_either(p: np.ndarray, noise: float, seed: int, bias: float) -> None:
    q = p + bias + noise * (1 - 1e-9) * np.random.default_rng(seed).uniform(-1, 1, len(p))
    if argmax_of_noise_lt_half_gap(q, noise):
        assert (np.delete(p, q.argmax()) < p[q.argmax()]).all()
    check = regret_of_argmax_le(q, noise, p)
    if np.ptp(q - p) <= 2 * noise:
        assert check is not None
        assert check.holds, str(check)
        assert p.max() - p[q.argmax()] <= 2 * noise + 1e-9


def test_both_are_attained() -> None:
    """The truth 2·noise apart and both predictions in the middle: the wrong one may be picked, at exactly that cost."""
    check = regret_of_argmax_le([1.0, 1.0], 1.0, [0.0, 2.0])
    assert check is not None
    assert (check.error, check.bound, check.holds, check.inputs) == (2.0, 2.0, True, 2)
    assert not argmax_of_noise_lt_half_gap([3.0, 1.0], 1.0)  # 2 · noise = gap is not enough: the truth may be a tie
    assert argmax_of_noise_lt_half_gap([3.0, 1.0], 0.999)
    assert not argmax_of_noise_lt_half_gap([3.0, 3.0], 0.0)
    assert argmax_of_noise_lt_half_gap([3.0], 100.0)


def test_where_the_noise_was_larger_than_stated_nothing_is_promised() -> None:
    assert regret_of_argmax_le([1.0, 0.0], 0.1, [0.7, 0.0]) is None
    assert regret_of_argmax_le([1.0, 0.0], 0.1, [np.nan, 0.0]) is None
    shifted = regret_of_argmax_le([1.0, 0.0], 0.1, [6.0, 5.0])
    assert shifted is not None
    some = regret_of_argmax_le([1.0, 0.9, 0.8], 0.1, [1.0, np.nan, 0.8])
    assert some is not None
    assert some.inputs == 2


@pytest.mark.parametrize(
    ("predicted", "noise"), [([], 0.1), ([np.nan], 0.1), ([1.0], -0.1), ([1.0], np.nan), ([1.0, np.inf], 0.1)]
)
def test_numbers_that_are_none_are_refused(predicted: list[float], noise: float) -> None:
    with pytest.raises(LyapunovPruneError, match="must be finite"):
        argmax_of_noise_lt_half_gap(predicted, noise)


def test_a_score_for_every_choice_is_needed() -> None:
    with pytest.raises(LyapunovPruneError, match=r"1 .*scores for 2"):
        regret_of_argmax_le([1.0, 2.0], 0.1, [1.0])


def test_what_rounding_may_account_for_is_asked_of_the_gap_and_given_to_the_regret() -> None:
    unit = 2.0**-40 * (3 + 1)  # of the largest prediction and of the noise
    assert not argmax_of_noise_lt_half_gap([3.0, 1.0 - 0.9 * unit], 1.0)
    assert argmax_of_noise_lt_half_gap([3.0, 1.0 - 1.1 * unit], 1.0)
    assert not argmax_of_noise_lt_half_gap([-3.0 + 2 - 2.0**-40, -3.0], 1.0)
    check = regret_of_argmax_le([1.0, -4.0], 2.5, [2.0, -3.0])
    assert check is not None
    assert check.margin == pytest.approx(2.0**-40 * (4 + 3 + 2.5) + 2.0**-37 * 5, rel=1e-12, abs=0)
    exact = regret_of_argmax_le([1.0, 0.0], 0.25, [1.5, 1.0])  # half the range of p − q is the noise itself
    assert exact is not None
