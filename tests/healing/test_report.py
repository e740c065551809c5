"""The report of healing: what was kept, what came back, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from healing.test_heal import pair

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.forward.reading import read
from lyapunov_prune.healing.report import Healing, HeldOut
from lyapunov_prune.healing.rounds import Round, Stretch
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import identify

BEFORE = np.array([4.0, 5.0, 4.5, 5.5])


def report(
    ids: torch.Tensor, *judged: np.ndarray, trials: int = 0, before: np.ndarray = BEFORE, **changes: Any
) -> Healing:
    """Of rounds of two steps that were judged so, the first `trials` of them trials."""
    student, teacher = pair()
    on = read(wrap(student), ids).measured_on()
    rounds = tuple(
        Round(Stretch("start" if k < trials else "here", k < trials, 1e-3 * (k + 1), 2), each)
        for k, each in enumerate(judged)
    )
    settings: dict[str, Any] = {
        "losses": np.arange(2.0 * len(rounds)),
        "rounds": rounds,
        "judged": before,
        "rank": None,
        "temperature": 1.0,
        "trained": 100,
        "teacher": identify(teacher),
        "held_out": None,
        "measured_on": on,
        "judged_on": on,
    }
    return Healing(**{**settings, **changes})


@pytest.mark.parametrize(
    ("judged", "kept"),
    [
        ((BEFORE - 1, BEFORE - 2, BEFORE - 1.5), 1),
        ((BEFORE + 1, BEFORE + 2), -1),
        ((BEFORE, BEFORE), -1),  # no better
        ((BEFORE - 1, np.full(4, math.inf)), 0),
        ((np.full(4, math.nan), BEFORE - 0.1), 1),
        ((BEFORE + np.array([-3.0, 1.0, 1.0, 0.9]),), -1),  # a lower mean, of one window alone
    ],
)
def test_what_beats_the_pruned_model_is_kept_and_nothing_else(
    judged: tuple[np.ndarray, ...], kept: int, ids: torch.Tensor, tmp_path: Path
) -> None:
    found = Healing.load(report(ids, *judged).save(tmp_path / "healing.json"))
    assert found.kept == kept
    assert list(found.to_frame()["kept"]).index(True) == kept + 1
    assert found.to_frame()["kept"].sum() == 1
    assert found.headline().startswith(f"Kept round {kept + 1}: " if kept >= 0 else "Nothing kept: ")
    assert str(found)


def test_without_enough_windows_for_a_test_nothing_is_kept(ids: torch.Tensor) -> None:
    found = report(ids, np.array([3.0, 5.5]), before=np.array([4.0, 5.0]))
    assert found.kept == -1
    assert "uncertain" in found.told()


def test_the_table_has_a_row_for_the_start_and_one_a_round(ids: torch.Tensor) -> None:
    rows = report(ids, BEFORE - 0.5, BEFORE - 1, np.full(4, math.inf), trials=1).to_frame()
    assert list(rows["round"]) == ["start", "trial 1", "round 1", "round 2"]
    assert list(rows["steps"]) == [0, 2, 4, 6]
    assert list(rows["validation perplexity"]) == pytest.approx(list(np.exp([4.75, 4.25, 3.75, math.inf])))
    assert list(rows["rate"][1:]) == pytest.approx([1e-3, 2e-3, 3e-3])


def test_the_learning_rate_is_the_peak_of_the_run_and_0_of_trials_alone(ids: torch.Tensor) -> None:
    assert report(ids, BEFORE - 1, BEFORE - 2, trials=1).learning_rate == 2e-3
    assert report(ids, BEFORE - 1, BEFORE - 2, trials=2).learning_rate == 0


@pytest.mark.parametrize(
    ("before", "after", "dense", "recovered"),
    [(24.0, 18.0, 14.0, 0.6), (24.0, 26.0, 14.0, -0.2), (24.0, 12.0, 14.0, 1.2), (14.0, 13.0, 14.0, math.nan)],
)
def test_recovered_is_the_share_of_the_perplexity_that_removal_cost(
    before: float, after: float, dense: float, recovered: float, ids: torch.Tensor, tmp_path: Path
) -> None:
    measured: Perplexity = perplexity(pair()[0], ids)
    held_out = HeldOut(*(dataclasses.replace(measured, nll=math.log(value)) for value in (before, after, dense)))
    found = Healing.load(report(ids, BEFORE - 1, held_out=held_out).save(tmp_path / "healing.json"))
    assert found.recovered == pytest.approx(recovered, nan_ok=True)
    assert ("recovered" in found.about()) == math.isfinite(recovered)


def test_without_evaluation_nothing_is_said_of_recovery(ids: torch.Tensor) -> None:
    found = report(ids, BEFORE - 1)
    assert found.recovered is None
    assert "Held-out" not in found.headline()
    assert "recovered" not in found.about()


def test_rounds_that_do_not_belong_together_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="different windows"):
        report(ids, BEFORE[:3])
    with pytest.raises(LyapunovPruneError, match="steps of healing"):
        report(ids, BEFORE, losses=np.zeros(3))
