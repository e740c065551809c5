"""What READMEs of the experiments state is what the committed numbers say."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tables

from experiments import abstract
from experiments.columns import Column
from experiments.compressions import told
from experiments.hierarchies import cell
from experiments.statements import correlation, interval, rank_interval, ranked, runs, short, span, table, verdict
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
CLIFF = importlib.import_module("experiments.1_contraction.early_layer_cliff.run")
DRIFT = importlib.import_module("experiments.4_hierarchy.drift.run")
ASYMMETRY = importlib.import_module("experiments.4_hierarchy.asymmetry.run")
BOUNDS = importlib.import_module("experiments.7_bounds.written_bounds.run")
MENDING = importlib.import_module("experiments.6_recovery.mending.run")
REDUCTIONS = importlib.import_module("experiments.5_joint.reductions_recovered.run")
REMOVAL = importlib.import_module("experiments.1_contraction.progressive_removal.run")
SPACES = importlib.import_module("experiments.4_hierarchy.spaces.run")


def test_the_cliff_is_where_the_perplexities_part_most() -> None:
    """By hand, from the windows' losses: the largest fall of the loss from a layer to the next, level by level."""
    cliff = Sensitivity.load(CLIFF.HERE / "cliff.json")
    losses = np.array([e.windows.mean() for e in cliff.effects if e.study == "cliff"]).reshape(5, 30)
    falls = losses[:, :-1] - losses[:, 1:]
    assert (falls.argmax(1) == 0).all()
    assert CLIFF.written()["drop"] == span(np.exp(falls.max(1)))


@pytest.mark.parametrize(
    ("spearman", "low", "high", "said"),
    [
        (-0.22, -0.37, -0.03, "**Differs:** A −0.22, −0.37 to −0.03"),
        (-0.01, -0.19, 0.16, "neither lies in the interval."),
        (-0.22, -0.37, -0.03, "of the former the same sign, and another size."),
        (0.0, -0.5, 0.5, "**Not decided:** A +0.00, −0.50 to +0.50"),
    ],
)
def test_drift_is_held_against_both_signs(spearman: float, low: float, high: float, said: str) -> None:
    assert said in DRIFT.beside_the_paper("A ", spearman, low, high)


def test_criteria_that_both_wreck_a_model_are_not_compared() -> None:
    small = Column.load(EXPERIMENTS / "columns" / "smollm2-135m.json")
    assert "**Differs:** smollm2-135m: removing 8 layers by ρ leaves 1.5 times higher" in abstract.verdicts([small], [])
    assert small.removal is not None
    for times, said in ((0.25, "Agrees:** smollm2-135m: removing"), (0.5, "Not decided:** smollm2-135m: removing")):
        sets = [
            replace(r, perplexity=times * r.perplexity, low=times * r.low, high=times * r.high)
            if r.criterion == "rho"
            else r
            for r in small.removal.sets
        ]
        turned = replace(small, removal=replace(small.removal, sets=tuple(sets)))
        assert f"**{said}" in abstract.verdicts([turned], [])
    wrecked = replace(small, perplexity=small.perplexity / 1000)
    assert "**Not decided:** smollm2-135m: removing 8" in abstract.verdicts([wrecked], [])


def test_numbers_as_they_are_written() -> None:
    assert [short(x) for x in (1148.17, 45.307, 2.0, 0.04312, 2_574_757, 1.234e9, -9.999e6, 2e7, np.inf)] == [
        "1,150",
        "45.3",
        "2",
        "0.0431",
        "2,570,000",
        "1.23e9",
        "-10,000,000",
        "2e7",
        "inf",
    ]
    assert (span([3.0, 1.0]), span([1.001, 1.002])) == ("1 to 3", "1")
    assert (runs([9, 0, 3, 4, 5, 1]), runs([])) == ("0, 1, 3 to 5, 9", "none")
    assert (correlation(-0.4412, 3e-6), correlation(np.nan, np.nan)) == ("−0.44 (p 3e-06)", "none")
    assert table(["a", "b"], [["x", 0.5]]) == "| a | b |\n| --- | --- |\n| x | 0.5 |\n"
    assert table(["|a|", "b"], [["\\|x", None], [1234, np.nan]]).splitlines()[2:] == ["| \\|x | — |", "| 1,234 | — |"]
    assert table(["|a|"], []).startswith("| \\|a\\| |")
    assert (interval(2.0, 1.5, 2.504), interval(2.0, np.nan, np.nan)) == ("2 (1.5–2.5)", "2")
    assert (verdict(1, "x."), verdict(0, "x.", no="Put right")) == ("**Agrees:** x.", "**Put right:** x.")
    assert cell({"x": 0.2, "x_low": 0.1, "x_high": 0.4}, "x", lambda x: 1 - x) == "0.8 (0.6–0.9)"


def test_what_is_not_told_from_none_is_no_difference() -> None:
    """The interval of a correlation of +0.41 over 18 pairs holds zero."""
    np.testing.assert_allclose(rank_interval(0.0, 28), np.tanh(np.array([-1, 1]) * 1.959964 / 5), rtol=1e-6)
    assert ranked(0.41, 18) == "+0.41 (−0.09 to +0.75)"
    assert ranked(np.nan, 18) == "none"


def test_what_a_plan_by_bi_says_of_the_ends() -> None:
    scales = importlib.import_module("experiments.2_criteria.scales.run")
    results = [scales.ScalesOnOneText.load(path) for path in sorted(scales.HERE.glob("*.json"))]
    took = set()
    for result, count in itertools.product(results, scales.COUNTS):
        kept, free = (scales._choice(result, "bi", ends, count) for ends in (False, True))
        if {0, result.measured_on.model.num_layers - 1} & set(free.removed):
            took.add(result.measured_on.model.name)
            assert told(kept, free) == "better"
    assert len(took) == 1
    plan = PruningPlan.given(results[0].measured_on.model, [0])
    assert "better with both ends kept (--protect 0,-1; experiments/2_criteria, one model)" in (
        replace(plan, criterion="bi").headline()
    )
    assert "ends kept" not in plan.headline()


def drops(kind: str) -> dict[int, float]:
    """What the attentions or the activations of SmolLM2 cost at once, gates at their mean, by number."""
    found = ASYMMETRY.Asymmetry.load(ASYMMETRY.HERE / "smollm2-135m" / ASYMMETRY.FILE)
    return {row.removed: getattr(row, kind) for row in found.of("drop")}


def unfinished() -> tuple[int, int]:
    """Of the recoveries of attentions, on both models and by both optimizers, those that ended before half."""
    ends = []
    for folder in (ASYMMETRY.HERE, ASYMMETRY.HERE / "smollm2-135m"):
        found = ASYMMETRY.Asymmetry.load(folder / ASYMMETRY.FILE)
        rows = [row for name in found.chosen for row in found.of("steps", name) if row.removed]
        ends += [row.attention >= found.marks[-1] for row in rows]
    return sum(ends), len(ends)


def affine_of_eight() -> float:
    rows = REDUCTIONS.written(REDUCTIONS.HERE / "smollm2-135m")["reductions"]
    return float(tables.cell(rows, "8", "`affine`", "lost, 95 %").split()[0])


def moves_most(folder: str) -> tuple[int, int]:
    """The attention and the MLP whose absence moves the prediction most, by their layer."""
    layers = SPACES.opened(SPACES.HERE / folder / "spaces.json")["layers"]
    return tuple(int(part.layer[part.kl.idxmax()]) for _, part in layers.groupby("what", sort=True))  # type: ignore


def random_draw() -> dict[int, bool]:
    """Whether the random draw is worse than every measured criterion, by number of layers removed."""
    rows = REMOVAL.by_count(REMOVAL.RemovalCurve.load(REMOVAL.HERE / "removal-builtin.json"))
    measured = ("rho", "rho, token pooling", "bi", "blend")
    return {n: row["random"] > max(row[name] for name in measured) for n, row in rows.items()}


@pytest.mark.parametrize(
    ("page", "words", "holds"),
    [
        (
            "1_contraction",
            "worse than all measured ones at four and more; at two it is not",
            lambda: random_draw() == {2: False, 4: True, 6: True, 8: True},
        ),
        (
            "4_hierarchy",
            "That of layer 1 moves it most on the two smaller models, that of layer 0 on Qwen; of the MLPs that of "
            "layer 0 on all three",
            lambda: (
                {moves_most(""), moves_most("gemma-3-270m")} == {(1, 0)} and moves_most("qwen2.5-coder-1.5b") == (0, 0)
            ),
        ),
        ("4_hierarchy", "most attentions had not regained half by then", lambda: unfinished()[0] > unfinished()[1] / 2),
        (
            "4_hierarchy",
            "With `mean-gate` it does",
            lambda: all(drops("activation")[n] > drops("attention")[n] for n in drops("attention")),
        ),
        ("4_hierarchy", "less than the attentions", lambda: affine_of_eight() < drops("attention")[8]),
        (
            "7_bounds",
            "one layer of\neach meets Theorem 10",
            lambda: BOUNDS.written()["theorem-10"].count("| layer ") == 8,
        ),
    ],
)
def test_a_sentence_without_a_number_holds_of_the_committed_results(
    page: str, words: str, holds: Callable[[], bool]
) -> None:
    """A result that moves must change the sentence: a claim written by hand fails here."""
    assert words in (EXPERIMENTS / page / "README.md").read_text(encoding="utf-8")
    assert holds()


def test_a_set_of_layers_that_two_criteria_choose_counts_once() -> None:
    whole = MENDING.Losses(np.zeros(2))
    by = [
        MENDING.Removal(name, gone, whole, whole, ())
        for name, gone in (("bi", (1, 2)), ("angular", (1, 2)), ("bi", (1,)))
    ]
    result = MENDING.MendedOnOneText.load(next(iter(sorted(MENDING.HERE.glob("*.json")))))
    counted = MENDING.once(replace(result, removals=tuple(by)))
    assert sorted((r.criterion, r.removed) for r in counted) == [("bi", (1,)), ("bi", (1, 2))]
