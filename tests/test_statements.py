"""What READMEs of the experiments state is what the committed numbers say."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tables

from experiments import abstract
from experiments.columns import Column
from experiments.compressions import CompressionTable, told
from experiments.hierarchies import cell
from experiments.statements import (
    correlation,
    goes_with,
    interval,
    rank_interval,
    ranked,
    runs,
    short,
    span,
    table,
    verdict,
)
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
CLIFF = importlib.import_module("experiments.1_contraction.early_layer_cliff.run")
GREEDY = importlib.import_module("experiments.3_compression.greedy.run")
METHODS = importlib.import_module("experiments.3_compression.methods.run")
ALLOCATION = importlib.import_module("experiments.3_compression.allocation.run")
DRIFT = importlib.import_module("experiments.4_hierarchy.drift.run")


def parted(readme: str, written: dict[str, str]) -> list[str]:
    """The names whose text between the markers is not what was written."""
    return [
        name
        for name, text in written.items()
        if not re.search(rf"<!-- {name} -->\n?{re.escape(text.strip())}\n?<!-- end -->", readme)
    ]


@pytest.fixture(scope="module")
def cliff() -> Sensitivity:
    return Sensitivity.load(CLIFF.HERE / "cliff.json")


EXAMINED = [
    "early_layer_cliff",
    "greedy",
    "allocation",
    "three_texts",
    "best",
    "scales",
    "search_curve",
    "two_factors",
]


@pytest.mark.parametrize("experiment", EXAMINED)
def test_the_readme_says_what_the_numbers_say(experiment: str) -> None:
    written = tables.written(experiment)
    assert not parted((tables.HOMES[experiment] / "README.md").read_text(encoding="utf-8"), written), (
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


Named = tuple[str, str, str, float]


@pytest.fixture(scope="module")
def allocation() -> CompressionTable:
    return CompressionTable.load(ALLOCATION.HERE / "allocation.json")


def made_up(like: CompressionTable, names: Iterable[Named]) -> CompressionTable:
    """The first row of a table by other names: method, allocation, unit, amount."""
    [first, *_] = like.rows
    named = (dict(zip(("method", "allocation", "unit", "amount"), name, strict=True)) for name in names)
    return replace(like, rows=tuple(replace(first, **fields) for fields in named))


def planted(found: CompressionTable, amount: float, name: str, base: str, by: float) -> CompressionTable:
    """One row of the first method has lost `by` nats a window more than `base`."""
    of = {row.allocation: row for row in found.rows if (row.method, row.amount) == (found.rows[0].method, amount)}
    windows = tuple(loss + by for loss in of[base].windows)
    return replace(found, rows=tuple(replace(row, windows=windows) if row is of[name] else row for row in found.rows))


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("owl", -1.0, "Differs:** 50 %: `owl` is better, 0.368 (0.368–0.368) of uniform"),
        ("owl", 0.0, "Not decided:** 50 %: `owl` is not to be told apart, 1 (1–1) of uniform"),
        ("owl", 1.0, "Agrees:** 50 %: `owl` is worse, 2.72 (2.72–2.72) of uniform"),
        ("atp-search", 0.0, "Agrees:** 50 %: `atp-search` is not to be told apart"),
        ("atp-search", 1.0, "Differs:** 50 %: `atp-search` is worse"),
    ],
)
def test_the_verdict_on_allocations_follows_the_numbers(
    allocation: CompressionTable, name: str, by: float, said: str
) -> None:
    assert said in ALLOCATION.verdict(planted(allocation, 0.5, name, "uniform", by))


def test_the_rules_under_s_are_said_to_part_only_where_they_do(allocation: CompressionTable) -> None:
    alike = ALLOCATION.verdict(planted(allocation, 0.5, ALLOCATION.STARRED, "guidelines", 0.0))
    assert "the guidelines under s\\* = 0.7 are those under the default of 0.9: neither binds" in alike
    parted = ALLOCATION.verdict(planted(allocation, 0.5, ALLOCATION.STARRED, "guidelines", 1.0))
    assert "the guidelines under s\\* = 0.7 are worse, 2.72 (2.72–2.72) of those under the default" in parted


def test_what_is_not_measured_is_said_and_no_verdict_is_given_on_it(allocation: CompressionTable) -> None:
    half = replace(allocation, rows=tuple(row for row in allocation.rows if row.amount == 0.5))
    fewer = replace(half, rows=tuple(row for row in half.rows if row.allocation not in ("owl", "lyapunov, token")))
    assert "not measured yet" not in ALLOCATION.verdict(half)
    assert "50 %, not measured yet: `owl`, `lyapunov, token`." in ALLOCATION.verdict(fewer)
    assert "`owl` is" not in ALLOCATION.verdict(fewer)
    assert "neither binds" not in ALLOCATION.verdict(fewer)


def test_the_verdict_on_bits_follows_the_numbers(allocation: CompressionTable) -> None:
    even: list[Named] = [("rtn", "uniform", "bits", bits) for bits in (3.0, 4.0, 6.0, 8.0)]
    made = made_up(
        allocation,
        even
        + [
            ("rtn", f"{low}/{high} {way}, {pooling}", "bits", (low + high) / 2)
            for low, high in ALLOCATION.WIDTHS
            for pooling in ("energy", "token")
            for way in ("by rho", "reversed")
        ],
    )
    for by, said in ((-1.0, "Agrees"), (0.0, "Not decided"), (1.0, "Differs")):
        turned = planted(made, 6.0, "4/8 by rho, energy", "4/8 reversed, energy", by)
        assert f"**{said}:** 4 or 8 bits by ρ, energy pooling" in ALLOCATION.verdict_bits(turned)
    assert "not to be told apart, 1 (1–1) of 6 bits evenly" in ALLOCATION.verdict_bits(made)


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
    assert "**Not to be told:** smollm2-135m: removing 8" in abstract.verdicts([wrecked], [])


def test_methods_are_paired_by_window_where_windows_were_kept() -> None:
    """Of Gemma's, Wanda and SparseGPT overlap against the dense model and part when they are paired."""
    rows = {r.method: r for r in CompressionTable.load(METHODS.HERE / "gemma-3-270m" / "methods.json").rows}
    assert rows["sparsegpt"].high > rows["wanda"].low
    assert "**Agrees:** SparseGPT beats Wanda" in METHODS.against_the_papers(rows)
    alike = METHODS.against_the_papers(rows | {"sparsegpt": rows["wanda"]})
    assert "**Not decided:** SparseGPT beats Wanda" in alike
    turned = METHODS.against_the_papers(rows | {"sparsegpt": rows["wanda"], "wanda": rows["sparsegpt"]})
    assert "**Differs:** SparseGPT beats Wanda" in turned
    older = {name: replace(row, windows=()) for name, row in rows.items()}
    assert "**Not decided:** SparseGPT beats Wanda" in METHODS.against_the_papers(older)
    lower = replace(older["sparsegpt"], low=1.0, high=1.1)
    assert "**Agrees:** SparseGPT beats Wanda" in METHODS.against_the_papers(older | {"sparsegpt": lower})


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
    """Of 18 pairs +0.41 is not told from none, and speaks neither for ranks that go together nor against."""
    np.testing.assert_allclose(rank_interval(0.0, 28), np.tanh(np.array([-1, 1]) * 1.959964 / 5), rtol=1e-6)
    assert ranked(0.41, 18) == "+0.41 (−0.09 to +0.75)"
    assert ranked(np.nan, 18) == "none"
    assert [goes_with(rank, 18, "x.") for rank in (0.41, 0.6, -0.6, np.nan)] == [
        "**Not decided:** x.",
        "**Agrees:** x.",
        "**Differs:** x.",
        "**Not decided:** x.",
    ]
    assert goes_with(-0.6, 18, "x.", -1) == "**Agrees:** x."


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
