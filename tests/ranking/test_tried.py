"""What a search tried and chose: scores, picks and refusals, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import as_batch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.ranking.tried import BestRemoval, Mended, Tried


@pytest.fixture
def search(llama: PreTrainedModel, ids: torch.Tensor) -> BestRemoval:
    on = as_batch(llama, ids).measured_on(llama)
    tried = (
        Tried("bi", (1, 2), np.array([2.0, 5.0, 2.0]), np.nan, 2.5),
        Tried("kl", (2, 4), np.array([5.0, 1.0, 1.5]), np.nan, 3.0),
        Tried("4 for 1", (2, 3), np.array([np.inf, 1.0, 4.0]), 1.0, 3.75),
    )
    dense = np.array([0.5, 0.5, 2.0])
    return BestRemoval(tried, 1, dense, 20.0, (), (0,), on, on)


def test_a_layer_has_the_least_mean_loss_of_the_sets_it_is_in(search: BestRemoval) -> None:
    plan = search.plan(2)
    assert plan.remove == search.remove == (2, 4)
    np.testing.assert_array_equal(plan.scores, [np.nan, 3.0, 2.5, np.inf, 2.5, np.nan])
    assert search.forwards == 3.75
    for count in (1, 3):
        with pytest.raises(LyapunovPruneError, match=f"the search was for 2 layers, not {count}"):
            search.plan(count)
    with pytest.raises(LyapunovPruneError, match="not periods"):
        search.plan(2, period=2)


def test_picks_are_of_windows_that_are_drawn_one_by_one(search: BestRemoval) -> None:
    """Which set is best depends on the windows drawn, of equal means the earlier."""
    found = search.picked()
    windows = np.random.default_rng(0).integers(3, size=(1000, 3))
    wanted = np.zeros(6)
    for drawn in windows:
        losses = [float(tried.windows[drawn].mean()) for tried in search.tried]
        for layer in search.tried[losses.index(min(losses))].layers:
            wanted[layer] += 1 / 1000
    np.testing.assert_allclose(found, wanted)
    assert 0 < found[1] < 0.5 < found[4] < 1 == found[2]
    # Neither a set without a loss nor one of an infinite loss is ever the best beside one that has a loss.
    bad = replace(search.tried[0], windows=np.full(3, np.nan))
    assert replace(search, tried=(bad, *search.tried[1:])).picked()[1] == 0


def test_mended_sets_are_compared_among_each_other(search: BestRemoval) -> None:
    mended = (Mended((1, 2), np.array([1.25, 1.25, 2.0]), 5.0), Mended((2, 4), np.array([1.0, 1.0, 1.375]), 7.0))
    found = replace(search, mended=mended)
    assert found.compared == mended
    assert found.forwards == 7.0
    assert found.picked()[[1, 2, 4]].tolist() == [0, 1, 1]
    frame = found.to_frame()
    np.testing.assert_allclose(frame["mended"], [np.exp(1.5), np.exp(1.125), np.nan])
    with pytest.raises(LyapunovPruneError, match="another set than it tried"):
        replace(search, mended=mended[:1])  # the chosen is not among them
    with pytest.raises(LyapunovPruneError, match="another set than it tried"):
        replace(search, mended=(*mended, replace(mended[0], layers=(3, 4))))


def test_the_table_is_of_means_of_losses(search: BestRemoval) -> None:
    frame = search.to_frame()
    np.testing.assert_allclose(frame["perplexity"], np.exp([3.0, 2.5, np.inf]))
    np.testing.assert_allclose(frame["× dense"], np.exp([2.0, 1.5, np.inf]))
    assert frame["layers"].tolist() == ["1, 2", "2, 4", "2, 3"]
    assert frame["chosen"].tolist() == [False, True, False]
    assert frame["forwards"].tolist() == [2.5, 3.0, 3.75]
    assert "3.8 of 20 forwards" in search.headline()
    for chosen in (-1, 3):
        with pytest.raises(LyapunovPruneError, match=f"chose set {chosen} of 3"):
            replace(search, chosen=chosen)
    replace(search, chosen=0)
    replace(search, chosen=2)
    with pytest.raises(LyapunovPruneError, match="best removal, layers"):
        replace(search, tried=(*search.tried, replace(search.tried[0], layers=(6,))))
