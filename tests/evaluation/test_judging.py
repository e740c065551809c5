"""The paired comparison that decides whether a change of weights is kept."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_tiny
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lyapunov_prune.data.text import _builtin
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import LEVEL, Losses, apart, compare, decided
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.pruning.removal import remove_layers

LOSSES = st.lists(st.floats(0.1, 10), min_size=4, max_size=12)


@given(LOSSES, st.integers(0, 99))
def test_it_is_the_one_sided_paired_t_test_of_four_blocks(before: list[float], seed: int) -> None:
    losses = np.array(before)
    after = losses + np.random.default_rng(seed).normal(-0.02, 0.1, len(losses))
    told = compare(losses, after)
    bounds = [0, *np.cumsum([len(losses) // 4 + (k < len(losses) % 4) for k in range(4)])]
    blocks = [(after - losses)[a:b].mean() for a, b in pairwise(bounds)]
    reference = stats.ttest_1samp(blocks, 0)
    less = reference.pvalue / 2 if reference.statistic < 0 else 1 - reference.pvalue / 2
    shift = told.change - np.mean(blocks)  # blocks of unequal sizes: the interval stands around the mean of all windows
    p_value = stats.t.cdf(reference.statistic + shift / (np.std(blocks, ddof=1) / 2), 3)
    assert told.p_value == pytest.approx(p_value, rel=1e-6)
    if len(losses) % 4 == 0:
        assert told.p_value == pytest.approx(less, rel=1e-6)
    interval = reference.confidence_interval(0.95)
    assert (told.low - shift, told.high - shift) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)
    assert told.pays == (told.p_value < LEVEL)
    assert told.pays == (told.high < 0)
    assert told.harms == (told.low > 0)


@pytest.mark.parametrize("change", [-1.0, 1.0])
def test_too_few_windows_neither_pay_nor_are_called_certain(change: float) -> None:
    told = compare(np.full(3, 2.0), np.full(3, 2.0 + change))
    assert not told.pays
    assert not told.has_power
    assert "uncertain" in told.told()


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


def looked(gain: float, runs: int = 500) -> tuple[float, float, float]:
    """How often a change that makes texts of 48 windows better by `gain` of their spread is kept, and on how many.

    The first look has the ends of four stretches, and neighbouring windows are alike. The last number is how often that
    look would have kept the change, had it been the only one.
    """
    draw = np.random.default_rng(1)
    first = [12 * stretch + k for stretch in range(4) for k in (9, 10, 11)]
    found = np.empty((runs, 3))
    for run in range(runs):
        own = draw.normal(size=49)
        after = 0.8 * own[1:] + 0.6 * own[:-1] - gain
        asked: list[int] = []

        def losses(some: list[int], after: np.ndarray = after, asked: list[int] = asked) -> Losses:
            asked += some
            return np.zeros(len(some)), after[some]

        seen, before, there, level = decided([first, range(48)], losses)
        assert sorted(asked) == seen
        assert np.array_equal(there, after[seen])
        found[run] = compare(before, there, level).pays, len(seen), compare(np.zeros(12), after[first]).pays
    return tuple(found.mean(0).tolist())


def test_a_clear_change_is_decided_by_few_windows_and_an_unclear_one_by_more() -> None:
    kept, windows, _ = looked(0.0)
    assert kept <= 0.05
    assert windows > 46
    kept, windows, _ = looked(6.0)
    assert kept == 1
    assert windows < 14
    kept, _, by_the_first = looked(0.8)
    assert kept > by_the_first + 0.2


@pytest.mark.parametrize("after", [np.zeros(3), np.zeros((2, 1)), np.zeros(0)])
def test_other_windows_are_refused(after: np.ndarray) -> None:
    with pytest.raises(LyapunovPruneError):
        compare(np.zeros(2), after)


def test_over_splits_of_real_text_the_intervals_hold_the_truth_of_the_other_text() -> None:
    """What a tiny model that has learnt some English loses without a layer; windows of 64 bytes of the built-in text.

    Each split begins elsewhere. Of a few paragraphs alone no interval can hold the truth of all; the plant, a t-test
    over single windows, is far surer of them.
    """
    ids = (torch.tensor(list(_builtin().encode())) % 97)[: 1280 * 64].view(-1, 64)
    model: Any = make_tiny("llama")
    optimizer, draw = torch.optim.Adam(model.parameters(), 3e-3), torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for _ in range(60):
            given = ids[torch.randint(len(ids), (8,), generator=draw)]
            model(input_ids=given, labels=given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    before, after = (perplexity(m, ids, batch_size=64).windows for m in (model.eval(), remove_layers(model, [3])))
    lost = {window.numpy().tobytes(): loss for window, loss in zip(ids, after - before, strict=True)}
    known, planted = np.array([*lost.values()]), 0
    held = dict.fromkeys([(1280, 8, 8), (1280, 8, 16), (1280, 8, 64), (64, 2, 32)], 0)
    for windows, of, most in held:
        for first in range(0, 1280, 32):
            judging = apart(read(wrap(model), ids.roll(-first, 0)[:windows]), of=of, most=most)[1]
            judged = np.array([lost[window.numpy().tobytes()] for window in judging.batch.ids])
            assert len(judged) == most
            truth = (known.sum() - judged.sum()) / (len(known) - most)
            told = compare(np.zeros(most), judged)
            held[windows, of, most] += told.low <= truth <= told.high
            low, high = stats.ttest_1samp(judged, 0).confidence_interval(0.95)
            planted += windows == 64 and low <= truth <= high
    *spread, local = held.values()
    assert min(spread) >= 0.9 * 40, held
    assert planted + 4 < local, held
