"""Recovered points: what one has learnt is what the next begins with, whatever came between on the disk."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_tiny

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.score import score
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.joint import points as module
from lyapunov_prune.joint.chains import DENSE, Pair, chains
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.joint.points import Course, recover_points
from lyapunov_prune.joint.recovery import RecoveryRecipe, recover
from lyapunov_prune.merging.unmerged import Unmerged
from lyapunov_prune.models.decoder import wrap_any
from lyapunov_prune.results.store import Store

STEPS = 2


def batch(name: str, windows: int, seed: int) -> TokenBatch:
    ids = torch.randint(3, 97, (windows, 24), generator=torch.Generator().manual_seed(seed))
    return TokenBatch(ids, name, "all", bos=False)


def course(folder: Path, rank: int | None, reduction: str, most: Pair = (2, 1)) -> Course:
    model, learn = make_tiny("llama").eval(), batch("learn", 40, 0)
    student = Unmerged(wrap_any(model), reduction, lambda: uncached_logits(model, learn.ids))
    worth = Importance("taylor", reduction, 1, np.array([3.0, 0, 2, 5, 1, 4]), np.array([0.0, 5, 4, 3, 2, 1]))
    recipe = RecoveryRecipe(rank=rank, learning_rate=5e-3)
    return Course(student, learn, worth, chains(3, most), STEPS, 7, recipe, folder, {"model": "tiny"})


@pytest.mark.parametrize("rank", [2, None])
@pytest.mark.parametrize("reduction", ["mean-gate", "affine"])
def test_a_point_begins_with_what_those_before_it_have_learnt(rank: int | None, reduction: str, tmp_path: Path) -> None:
    """Against one student who takes all lessons in a row and is never written down."""
    subject = course(tmp_path, rank, reduction)
    select = batch("select", 4, 1)
    with Store(tmp_path, "joint removal", subject.about) as store:
        points = recover_points(subject, select, [(1, 0)], 2, store, batch_size=2)
    assert points.pairs.tolist() == [[1, 0], [2, 0], [0, 1], [2, 1], [1, 1], [1, 0]]
    assert subject.lineage((2, 1)) == [(1, 0), (2, 0), (2, 1)]
    pupil = copy.deepcopy(subject.student)
    for pair in subject.lineage((2, 1)):
        lesson = subject.lesson(pair, 7)
        assert (len(lesson.attention), len(lesson.activation)) == pair
        with TrainingState(None, {}) as state:
            recover(pupil, subject.teacher, subject.learn, lesson, subject.recipe, state)
        place = points.pairs.tolist().index(list(pair))
        with pupil.cut(lesson.attention, lesson.activation) as model:
            assert score(model, select, batch_size=2).value == points.scores[place]
    again = subject.taught((2, 1))
    gone = lesson.attention, lesson.activation  # of what is gone nobody learns on
    with pupil.cut(*gone) as one, again.cut(*gone) as other:
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
        assert torch.equal(uncached_logits(one, select.ids), uncached_logits(other, select.ids))
    assert points.repeats() == [[points.scores[0], points.scores[5]]]
    assert points.scores[0] != points.scores[5]
    assert not (tmp_path / "1-0-8").exists()


def test_items_come_once_before_any_comes_twice_along_a_chain(tmp_path: Path) -> None:
    subject = course(tmp_path, 2, "mean-gate")
    items = [i for pair in [(1, 0), (2, 0), (2, 1)] for i in subject.lesson(pair, 7).items]
    items += subject.last_lesson((2, 1), (2, 1), 34).items
    assert sorted(items) == list(range(40))
    assert subject.lesson((1, 1), 7).items == subject.lesson((2, 0), 7).items


def test_the_final_recovery_begins_at_the_nearest_point(tmp_path: Path) -> None:
    subject = course(tmp_path, 2, "mean-gate", (4, 4))
    assert subject.nearest((2, 1)) == (2, 1)
    assert subject.nearest((3, 1)) in {(2, 1), (3, 0)}
    assert subject.nearest((0, 4)) == (0, 3)
    assert subject.nearest(DENSE) == DENSE


def test_a_disk_without_room_is_refused_before_anything_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = course(tmp_path / "jobs", None, "mean-gate")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("", (), {"free": 2**20}))
    with (
        Store(tmp_path / "jobs", "joint removal", {}) as store,
        pytest.raises(LyapunovPruneError, match="5 points"),
    ):
        recover_points(subject, batch("select", 4, 1), [], 1, store, batch_size=1)


def test_a_selection_that_cannot_tell_the_axes_apart_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Paired: scores that all move together are told apart by less than what each errs by."""
    apart = [{"score": float(np.mean(items)), "items": items} for items in ([1.0, 5.0, 9.0], [0.9, 4.8, 8.7])]
    module._warn_of_noise(apart)
    assert capsys.readouterr().err == ""
    noise = np.array([-1.0, 0.0, 1.0])  # the mean errs by 1 / √3
    for times, warned in ((0.8, True), (1.2, False)):
        better = np.array([1.0, 5.0, 9.0]) + noise + times / np.sqrt(3)
        near = [{"score": float(np.mean(items)), "items": items} for items in ([1.0, 5.0, 9.0], better.tolist())]
        module._warn_of_noise(near)
        assert bool(capsys.readouterr().err) == warned
    mixed = [{"score": float(np.mean(items)), "items": items} for items in ([1.0, 5.0, 9.0], [8.7, 4.8, 0.9])]
    module._warn_of_noise(mixed)
    told = capsys.readouterr().err
    assert told.startswith("warning: the points of both axes differ by 0.2 at most")
    assert told.count("\n") == 1
