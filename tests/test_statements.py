"""What READMEs of the experiments state is what the committed numbers say."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.statements import correlation, interval, runs, short, span, table
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
CLIFF = importlib.import_module("experiments.03_early_layer_cliff.run")
GREEDY = importlib.import_module("experiments.06_greedy.run")
DRIFT = importlib.import_module("experiments.21_drift.run")


def parted(readme: str, written: dict[str, str]) -> list[str]:
    """The names whose text between the markers is not what was written."""
    return [
        name
        for name, text in written.items()
        if not re.search(rf"<!-- {name} -->\n{re.escape(text.strip())}\n<!-- end -->", readme)
    ]


@pytest.fixture(scope="module")
def cliff() -> Sensitivity:
    return Sensitivity.load(CLIFF.HERE / "cliff.json")


@pytest.mark.parametrize("experiment", ["03_early_layer_cliff", "06_greedy", "21_drift"])
def test_the_readme_says_what_the_numbers_say(experiment: str) -> None:
    written = importlib.import_module(f"experiments.{experiment}.run").written()
    assert not parted((EXPERIMENTS / experiment / "README.md").read_text(encoding="utf-8"), written), (
        "run `make tables`"
    )


def test_planted_fault_a_statement_that_parted_is_seen() -> None:
    written = CLIFF.written()
    readme = (CLIFF.HERE / "README.md").read_text(encoding="utf-8")
    assert parted(readme.replace("after layer 0", "after layer 2"), written) == ["verdict"]


def test_the_cliff_is_where_the_perplexities_part_most(cliff: Sensitivity) -> None:
    """By hand, from the windows' losses: the largest fall of the loss from a layer to the next, level by level."""
    losses = np.array([e.windows.mean() for e in cliff.effects if e.study == "cliff"]).reshape(5, 30)
    falls = losses[:, :-1] - losses[:, 1:]
    assert (falls.argmax(1) == 0).all()
    place = "at all 5 levels the largest drop from one layer to the next is after layer 0"
    assert f"{place}, by {span(np.exp(falls.max(1)))} times" in CLIFF.verdict(cliff)


def made_bearable(cliff: Sensitivity, layers: tuple[int, ...], levels: int) -> Sensitivity:
    """These layers harm as little as layer 1, at the first so many levels."""
    bearable = {e.sparsity: e.windows for e in cliff.effects if e.study == "cliff" and e.layer == 1}
    kept = sorted(bearable)[:levels]
    return replace(
        cliff,
        effects=tuple(
            replace(e, windows=bearable[e.sparsity])
            if e.study == "cliff" and e.layer in layers and e.sparsity in kept
            else e
            for e in cliff.effects
        ),
    )


def test_the_verdict_follows_the_numbers(cliff: Sensitivity) -> None:
    as_the_paper = CLIFF.verdict(made_bearable(cliff, (0, 8, 9), 5))
    assert "**Agrees:** the place of the cliff is the same at all 5 levels" in as_the_paper
    assert "**Agrees:** at all 5 levels the largest drop from one layer to the next is after layer 2" in as_the_paper
    moving = CLIFF.verdict(made_bearable(cliff, (0,), 1))
    assert "**Differs:** the place of the cliff is not the same" in moving
    assert "is after layer 0 at 4, after layer 2 at 1 of 5 levels" in moving


def test_the_sign_of_drift_follows_the_numbers() -> None:
    heavy = DRIFT.measured()["heavy"]
    assert "A is negative: −0.36" in DRIFT.verdict({"heavy": heavy})
    turned = DRIFT.verdict({"heavy": replace(heavy, drift=-heavy.drift)})
    assert "**Differs:** heavy, token pooling: the correlation of drift with A is positive: +0.36" in turned


def test_the_verdict_on_the_greedy_order_follows_the_numbers() -> None:
    """Ten times what each round saves; values first and of MLPs; the paper's rank."""
    measured = Sensitivity.load(GREEDY.HERE / "greedy.json")
    assert "**Differs:** up to 1.27 times the perplexity the rounds save" in GREEDY.verdict(measured)
    effects = tuple(
        replace(e, saved=10 * e.saved, label="+ 0 mlp.up_proj" if i else "+ 7 self_attn.v_proj")
        for i, e in enumerate(measured.effects)
    )
    turned = GREEDY.verdict(
        replace(measured, effects=effects, compression=replace(measured.compression, rank=GREEDY.RANK))
    )
    assert "**Agrees:** up to 1.27 times the perplexity the rounds save" in turned
    assert "**Differs:** of 36 groups taken 35 are of an MLP, 35 of one in the first third" in turned
    assert "**Agrees:** mean round in which a component was taken: v_proj 1, up_proj 19" in turned
    assert "Not the same" not in turned


def test_numbers_as_they_are_written() -> None:
    assert [short(x) for x in (1148.17, 45.307, 2.0, 0.04312, 2_574_757)] == [
        "1,150",
        "45.3",
        "2",
        "0.0431",
        "2,570,000",
    ]
    assert (span([3.0, 1.0]), span([1.001, 1.002])) == ("1 to 3", "1")
    assert (runs([9, 0, 3, 4, 5, 1]), runs([])) == ("0, 1, 3 to 5, 9", "none")
    assert (correlation(-0.4412, 3e-6), correlation(np.nan, np.nan)) == ("−0.44 (p 3e-06)", "none")
    assert table(["a", "b"], [["x", 0.5]]) == "| a | b |\n| --- | --- |\n| x | 0.5 |\n"
    assert table(["|a|", "b"], [["\\|x", None], [1234, np.nan]]).splitlines()[2:] == ["| \\|x | — |", "| 1,234 | — |"]
    assert table(["|a|"], []).startswith("| \\|a\\| |")
    assert (interval(2.0, 1.5, 2.504), interval(2.0, np.nan, np.nan)) == ("2 (1.5–2.5)", "2")
