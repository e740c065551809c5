"""The paired comparison that decides whether a change of weights is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import LEVEL, compare

LOSSES = st.lists(st.floats(0.1, 10), min_size=2, max_size=12)


@given(LOSSES, st.integers(0, 99))
def test_it_is_the_one_sided_paired_t_test(before: list[float], seed: int) -> None:
    losses = np.array(before)
    after = losses + np.random.default_rng(seed).normal(-0.02, 0.1, len(losses))
    told = compare(losses, after)
    reference = stats.ttest_rel(after, losses, alternative="less")
    assert told.p_value == pytest.approx(reference.pvalue, rel=1e-9)
    interval = stats.ttest_rel(after, losses).confidence_interval(0.95)
    assert (told.low, told.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    if len(losses) >= 4:
        assert told.pays == (told.p_value < LEVEL)


def test_without_power_the_lower_loss_is_taken_and_called_uncertain() -> None:
    told = compare(np.array([2.0, 3.0]), np.array([2.1, 2.8]))
    assert told.pays
    assert not told.has_power
    assert told.p_value > LEVEL


def test_a_gain_that_windows_disagree_about_is_not_believed() -> None:
    told = compare(np.full(8, 2.0), np.array([1.0, 2.9, 1.2, 2.7, 1.1, 2.9, 1.3, 2.8]))
    assert told.change < 0
    assert not told.pays


def test_what_is_not_finite_never_pays() -> None:
    assert not compare(np.array([2.0, 2.0]), np.array([1.0, np.nan])).pays
    assert not compare(np.array([2.0]), np.array([np.inf])).pays
    with pytest.raises(LyapunovPruneError):
        compare(np.array([np.nan, 2.0]), np.array([1.0, 1.0]))


def test_equal_models_do_not_pay_and_a_certain_gain_does() -> None:
    losses = np.array([1.0, 2.0, 3.0, 4.0])
    assert not compare(losses, losses).pays
    assert compare(losses, losses - 0.5).p_value == 0
    assert compare(losses, losses - 0.5).pays


@pytest.mark.parametrize("after", [np.zeros(3), np.zeros((2, 1)), np.zeros(0)])
def test_other_windows_are_refused(after: np.ndarray) -> None:
    with pytest.raises(LyapunovPruneError):
        compare(np.zeros(2), after)
