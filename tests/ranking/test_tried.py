"""What a search tried and chose: scores, picks and refusals, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import as_batch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.ranking.tried import BestRemoval, Final, Tried, mended


@pytest.fixture
def search(llama: PreTrainedModel, ids: torch.Tensor) -> BestRemoval:
    on = as_batch(llama, ids).measured_on(llama)
    tried = (
        Tried("bi", (1, 2), np.array([2.0, 5.0, 2.0]), False, 2.5),
        Tried("kl", (2, 4), np.array([5.0, 1.0, 1.5]), False, 3.0),
        Tried("4 for 1", (2, 3), np.array([np.inf, 1.0, 4.0]), True, 3.75),
    )
    dense = np.array([0.5, 0.5, 2.0])
    return BestRemoval(tried, 1, dense, 20.0, (), (0,), on, on)


def test_a_layer_has_the_least_mean_loss_of_the_sets_it_is_in(search: BestRemoval) -> None:
    plan = search.plan(2)
    assert plan.remove == search.remove == (2, 4)
    np.testing.assert_array_equal(plan.scores, [np.nan, 3.0, 2.5, np.inf, 2.5, np.nan])
    assert search.forwards == 3.75
    for count in (1, 3):
        with pytest.raises(LyapunovPruneError, match=f"2 layers, not {count}"):
            search.plan(count)


FOUR = np.array([3.0, 2.0, 4.0, 3.0])  # windows, so that a test has power


def tried(layers: tuple[int, ...], above: float, spread: float = 0.01) -> Tried:
    return Tried("bi", layers, FOUR + above + spread * np.array([1, -1, 2, -2]), False, 1.0)


def told(search: BestRemoval, *sets: Tried) -> str:
    """Of these sets, the first the chosen one."""
    return replace(search, tried=sets, chosen=0).certainty()


def test_what_is_told_apart_is_a_paired_test_over_windows(search: BestRemoval) -> None:
    first, near, far = tried((1, 2), 0.0), tried((2, 4), 0.001, -0.01), tried((2, 3), 1.0)
    close = "No significant difference from 1 of the others, as layers 2, 4: +0.1%"
    assert told(search, first, near, far).startswith(close)
    assert told(search, first, far).startswith(
        "Significantly better than every other set; the next, layers 2, 3: +171.8%"
    )
    assert told(search, first, replace(far, windows=FOUR * np.nan)) == ""
    frame = replace(search, tried=(first, near, far), chosen=0).to_frame()
    assert np.isnan(frame["p"][0])
    assert frame["p"][1] > 0.05 > frame["p"][2]


def test_with_too_few_windows_nothing_is_told_apart(search: BestRemoval) -> None:
    assert "too few for a test" in search.headline()
    assert search.to_frame()["p"].isna().all()


def final(layers: tuple[int, ...], check: float, other: float, other_cut: float) -> Final:
    """A set that mending changes so much, on windows of its text and of the other."""
    cut = np.array([2.0, 3.0, 2.5, 3.5])
    return Final(layers, FOUR + check, cut + other_cut, cut + other_cut + other, 9.0)


@pytest.fixture
def four(search: BestRemoval) -> BestRemoval:
    return replace(search, tried=(tried((1, 2), 0.0, 0), tried((2, 4), 0.1, 0)), chosen=0, dense=FOUR)


@pytest.mark.parametrize(
    ("first", "second", "chosen", "how"),
    [
        ((-0.5, -0.1), (-0.5, -0.1), (1, 2), "; mended"),
        ((-0.5, 0.1), (-0.5, -0.1), (2, 4), "; mended"),  # the first fits its own text alone
        ((-0.5, 0.1), (-0.5, 0.1), (1, 2), "; better left unmended"),
        ((0.1, -0.5), (0.1, -0.5), (1, 2), "; better left unmended"),
        ((np.nan, np.nan), (-0.5, -0.1), (2, 4), "; mended"),
    ],
)
def test_the_least_loss_over_both_texts_is_chosen(
    four: BestRemoval, first: tuple[float, float], second: tuple[float, float], chosen: tuple[int, ...], how: str
) -> None:
    finals = [final((1, 2), *first, 0.0), final((2, 4), *second, 0.0)]
    found = four.with_finals(finals, four.measured_on)
    assert found.remove == chosen
    assert found.headline().splitlines()[2].endswith(how)
    assert found.forwards == 9.0
    assert mended(finals[1], found.tried[1].windows) == (second == (-0.5, -0.1))
    assert found.to_frame()["mended"].notna().tolist() == [not np.isnan(first[0]), True]


def test_a_set_that_is_worse_on_the_other_text_is_not_chosen(four: BestRemoval) -> None:
    """Both are better unmended; the second loses 0.1 more on the check windows and 0.4 less on the other text."""
    finals = [final((1, 2), 0.1, 0.1, 0.4), final((2, 4), 0.1, 0.1, 0.0)]
    assert four.with_finals(finals, four.measured_on).remove == (2, 4)


def test_finals_are_of_tried_sets_and_name_their_text(four: BestRemoval) -> None:
    finals = (final((1, 2), -0.5, -0.1, 0.0),)
    assert replace(four, finals=finals, other_on=four.measured_on).finals == finals
    with pytest.raises(LyapunovPruneError, match="it never tried"):
        replace(four, finals=finals, chosen=1, other_on=four.measured_on)
    with pytest.raises(LyapunovPruneError, match="it never tried"):
        replace(four, finals=(*finals, replace(finals[0], layers=(3, 4))), other_on=four.measured_on)
    with pytest.raises(LyapunovPruneError, match="second text"):
        replace(four, finals=finals)


def test_the_table_is_of_means_of_losses(search: BestRemoval) -> None:
    frame = search.to_frame()
    np.testing.assert_allclose(frame["perplexity"], np.exp([3.0, 2.5, np.inf]))
    np.testing.assert_allclose(frame["× dense"], np.exp([2.0, 1.5, np.inf]))
    assert frame["layers"].tolist() == ["1, 2", "2, 4", "2, 3"]
    assert frame["chosen"].tolist() == [False, True, False]
    assert frame["forwards"].tolist() == [2.5, 3.0, 3.75]
    assert "3.8 of 20 forwards" in search.headline()
    for chosen in (-1, 3):
        with pytest.raises(LyapunovPruneError, match=f"set {chosen} of 3"):
            replace(search, chosen=chosen)
    replace(search, chosen=0)
    replace(search, chosen=2)
    with pytest.raises(LyapunovPruneError, match="best removal, layers"):
        replace(search, tried=(*search.tried, replace(search.tried[0], layers=(6,))))
