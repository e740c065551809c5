"""Three slices of one data set: disjoint, stratified, the same again, and large enough."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import digits, make_classifier

from lyapunov_prune import LyapunovPruneError, TokenBatch
from lyapunov_prune.data import slices
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.export.compact import Cuts, make_compact


def test_every_slice_of_images_holds_every_class_in_its_share() -> None:
    images = digits(100)
    cut = slices(images)
    assert [len(part) for part in cut] == [60, 20, 20]
    assert [torch.bincount(part.labels).tolist() for part in cut] == [[12] * 5, [4] * 5, [4] * 5]
    assert [part.split for part in cut] == ["learn", "select", "final"]
    assert {part.source for part in cut} == {"digits"}
    together = sorted(np.concatenate([part.image_hashes for part in cut]).tolist())
    assert together == sorted(images.image_hashes.tolist())


def test_no_slice_shares_an_image_with_another() -> None:
    model, cut = make_classifier("vit"), slices(digits(100))
    shared = [[a.shared_with(b.measured_on(model)) for b in cut] for a in cut]
    assert shared == [[60, 0, 0], [0, 20, 0], [0, 0, 20]]


def test_copies_of_an_image_stay_together_whatever_they_are_called() -> None:
    images = digits(100)
    doubled = replace(images, pixels=images.pixels.repeat(2, 1, 1, 1), labels=torch.cat([images.labels] * 2))
    doubled.labels[150] = 3  # a copy with a wrong label
    cut = slices(doubled)
    assert sum(map(len, cut)) == 200
    for one, other in combinations(cut, 2):
        assert not np.isin(one.image_hashes, other.image_hashes).any()


def test_the_slices_are_those_of_the_seed_and_shuffled() -> None:
    images = digits(100)
    a, again, other = slices(images), slices(images), slices(images, seed=1)
    assert [p.text_hash for p in a] == [p.text_hash for p in again]
    assert a.final.text_hash != other.final.text_hash
    assert a.learn.labels.tolist() != sorted(a.learn.labels.tolist())


def test_a_class_too_small_for_three_slices_is_named() -> None:
    images = digits(100)
    few = images.take([i for i in range(100) if i % 5 != 2 or i < 20])
    with pytest.raises(LyapunovPruneError, match="4 different images of class 2"):
        slices(few)


def test_a_slice_that_made_the_model_is_known_when_it_is_scored() -> None:
    model, cut = make_classifier("vit"), slices(digits(100))
    made = make_compact(model, Cuts((1,), measured_on=(cut.learn.measured_on(model),)))
    require_unseen(made, cut.final)
    again = replace(cut.learn.take(range(7)), split="final")
    with pytest.raises(LyapunovPruneError, match=r"7 of the 7 images of digits \(final\)"):
        require_unseen(made, again)


def text(windows: int, context: int = 80) -> TokenBatch:
    ids = torch.randint(97, (windows, context), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids, "a book", "calibration", None)


def test_windows_of_text_are_cut_in_their_order() -> None:
    batch = text(12)
    cut = slices(batch)
    assert torch.equal(torch.cat([part.ids for part in cut]), batch.ids)
    assert [len(part) for part in cut] == [7, 3, 2]
    assert [part.split for part in cut] == ["learn", "select", "final"]


def test_slices_of_a_text_that_share_tokens_are_refused() -> None:
    batch = text(20)
    batch.ids[19, 10:] = batch.ids[3, 5:75]
    with pytest.raises(LyapunovPruneError, match="share 64 tokens"):
        slices(batch)


def test_a_text_too_short_for_three_slices_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match=r"6 windows.*tokens"):
        slices(text(6))
