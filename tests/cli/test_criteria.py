"""`rank` and `prune` by every criterion, and by a budget of divergence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK, TEXT, Done

from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.ranking.tried import BestRemoval


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        (["--remove", "34%"], "best"),
        (["--remove", "2", "--criterion", "bi"], "bi"),
        (["--remove", "34%", "--what", "attention"], "bi"),
    ],
)
def test_a_number_or_a_share_goes_by_best_if_no_criterion_is_given(
    options: list[str], criterion: str, run: Callable[..., Done]
) -> None:
    """In a plan as in a checkpoint; where best is not defined, by bi."""
    assert run("rank", "tiny", *options, "-o", "run", *TEXT).code == 0
    plan = PruningPlan.load("run/plan.json")
    assert (plan.criterion, len(plan.touched)) == (criterion, 2)
    done = run("prune", "tiny", *options, "-o", "out", *TEXT)
    assert done.code == 0, done.err
    assert Provenance.load("out/provenance.json").plan.touched == plan.touched
    assert ("sets tried" in done.out) == (criterion == "best")


def test_an_order_without_a_number_is_by_bi(run: Callable[..., Done]) -> None:
    assert "by bi" in run("rank", "tiny", "-o", "run", *TEXT).out
    run("profile", "tiny", "-o", "run", *QUICK)
    assert "by bi" in run("rank", "run/profile.json", "--remove", "25%").out


def test_criteria_that_look_at_the_predictions(run: Any) -> None:
    assert run("rank", "tiny", "--criterion", "kl", "--remove", "2", *TEXT).code == 0
    assert PruningPlan.load("runs/tiny/plan.json").criterion == "kl"
    assert Path("runs/tiny/divergence.json").is_file()
    assert run("prune", "tiny", "--criterion", "oracle", "--remove", "2", "-o", "out", *TEXT).code == 0
    by_hand = run("rank", "tiny", "--criterion", "oracle", "--remove", "2", *TEXT)
    assert by_hand.code == 0
    assert PruningPlan.load("runs/tiny/plan.json").remove == Provenance.load("out/provenance.json").plan.remove
    done = run("rank", "tiny", "--criterion", "oracle", *TEXT)
    assert done.code == 2
    assert "give --remove N" in done.err
    assert "x.json is not there" in run("rank", "x.json", "--criterion", "kl").err


def test_the_best_of_all_criteria_within_a_budget(run: Any) -> None:
    asked = (
        "tiny",
        "--criterion",
        "best",
        "--remove",
        "2",
        "--protect",
        "-1,0",
        *TEXT,
        "--context",
        "16",
    )
    assert run("rank", *asked).code == 0
    found = BestRemoval.load("runs/tiny/best.json")
    assert found.protected == (0, 5)
    assert "The best of many choices" in (run("report", "runs/tiny") and Path("runs/tiny/report.html").read_text())
    done = run("prune", *asked, "-o", "out")
    assert done.code == 0
    assert "significant" in done.out.lower()
    assert Provenance.load("out/provenance.json").plan.remove == found.remove
    assert run("rank", *asked).code == 0
    assert BestRemoval.load("runs/tiny/best.json").remove == found.remove
    small = run("prune", *asked, "--search", "1", "-o", "no")
    assert (small.code, small.changed) == (2, set())
    assert "1 forwards" in small.err


def test_a_run_of_layers_goes_as_one(run: Any) -> None:
    assert run("rank", "tiny", "--criterion", "angular", "--remove", "2", *TEXT).code == 0
    plan = PruningPlan.load("runs/tiny/plan.json")
    assert plan.remove == (plan.remove[0], plan.remove[0] + 1)
    assert run("prune", "tiny", "--criterion", "angular", "--remove", "2", "-o", "out", *TEXT).code == 0
    assert Provenance.load("out/provenance.json").plan.remove == plan.remove
    assert "give --remove N" in run("rank", "tiny", "--criterion", "angular", *TEXT).err
