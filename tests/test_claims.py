"""Sentences that are written by hand hold of the committed numbers: a result that moves fails its sentence."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import tables
from scipy import stats

from experiments.compressions import told
from experiments.removal_curve import RemovalCurve
from lyapunov_prune.evaluation.judging import compare
from lyapunov_prune.profiles.contraction import ContractionProfile

TEXTS = importlib.import_module("experiments.2_criteria.three_texts.run")
ERRORS = importlib.import_module("experiments.3_compression.errors_used.run")
DRAWS = importlib.import_module("experiments.4_hierarchy.sampled_decoding.run")
PREDICTION = importlib.import_module("experiments.4_hierarchy.prediction.run")
STEPS = importlib.import_module("experiments.6_recovery.never_worse.run")
EXPERTS = importlib.import_module("experiments.8_experts_and_states.experts.run")

QWEN = "qwen2.5-coder-1.5b"
UP_DENSE = importlib.import_module("experiments.3_compression.allocation.run").UP_DENSE


def rows(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def influence_against_rho() -> dict[str, tuple[int, int]]:
    """How often Block Influence is better than rho, and how often worse, by model."""
    times: dict[str, Counter[str]] = {}
    for result in TEXTS.OnOneText.all(TEXTS.HERE):
        for count in TEXTS.COUNTS:
            word = told(result.of("bi", count), result.of("rho", count))
            times.setdefault(result.measured_on.model.name, Counter())[word] += 1
    return {name: (found["better"], found["worse"]) for name, found in times.items()}


def best_over_single() -> tuple[int, int]:
    """In how many removals the interval of `best` over the best single criterion lies below one, and above it."""
    intervals = [re.search(r"\(([\d.]+)–([\d.]+)\)", row[-2]) for row in rows(tables.written("best")["chosen"])]
    ends = [tuple(map(float, found.groups())) for found in intervals if found]
    return sum(high < 1 for _, high in ends), sum(low > 1 for low, _ in ends)


def better_than_uniform(column: int) -> list[set[str]]:
    """The schedules that are better than uniform, model by model, at 50 % (column 2) or 70 % (column 4)."""
    home = tables.HOMES["allocation"]
    found = [tables.written("allocation"), tables.written("allocation", home / "gemma-3-270m")]
    return [{row[0] for row in rows(f["schedules"]) if row[column].endswith("better")} for f in found]


def corrected_over_both() -> list[float]:
    """The upper end of the paired difference of the losses, at both amounts of SparseGPT on SmolLM2."""
    ends = []
    for name in ("sparsegpt-50", "sparsegpt-60"):
        found = {row.variant: np.array(row.loss) for row in ERRORS.ErrorsUsed.load(ERRORS.HERE / f"{name}.json").rows}
        ends.append(compare(found["both"], found["corrected"]).high)
    return ends


def repeats_more(folder: str) -> set[str]:
    """The compressions whose greedy texts repeat themselves more than the dense model's (Wilcoxon, 5 %)."""
    found = DRAWS.SampledDecoding.load(DRAWS.HERE / folder / "decoding.json")
    more = {text.model: text.compressed[0] - text.dense[0] for text in found.texts}
    return {name for name, change in more.items() if change.mean() > 0 and stats.wilcoxon(change).pvalue < 0.05}


def drawn_repeat_less(folder: str) -> int:
    """For how many compressions drawn texts repeat themselves less than greedy ones (Wilcoxon, 5 %)."""
    found = DRAWS.SampledDecoding.load(DRAWS.HERE / folder / "decoding.json")
    changes = [drawn - greedy for greedy, drawn in (DRAWS.both(text.compressed) for text in found.texts)]
    return sum(change.mean() < 0 and stats.wilcoxon(change).pvalue < 0.05 for change in changes)


def estimates_alike(folder: str) -> bool:
    """Whether the correlations of `kl` and of `cosine` lie within each other's intervals, in every row."""
    signed = re.compile(r"[+−][\d.]+")
    cells = [row[1:] for row in rows(PREDICTION.written(PREDICTION.HERE / folder)["variances"])]
    found = [[[float(x.replace("−", "-")) for x in signed.findall(cell)] for cell in row] for row in cells]
    return all(b[1] <= a[0] <= b[2] and a[1] <= b[0] <= a[2] for a, b in found)


def oracle_below_all() -> bool:
    """Whether, seven layers of Qwen removed, the interval of the greedy oracle lies below that of every criterion."""
    curve = RemovalCurve.load(tables.HOMES["removal_criteria"] / QWEN / "removal.json")
    seven = {r.criterion: r for r in curve.rows if len(r.removed) == 7 and "mended" not in r.criterion}
    return all(seven["oracle"].high < row.low for name, row in seven.items() if name != "oracle")


def regained() -> list[tuple[float, float]]:
    """What mending and then healing took off the loss, run by run."""
    results = [STEPS.NeverWorse.load(path) for path in sorted(STEPS.HERE.glob("*.json"))]
    return [tuple(float((a.windows - b.windows).mean()) for a, b in pairwise(r.states)) for r in results]  # type: ignore


def reap_over_layers(count: int) -> tuple[float, float]:
    """The interval of the divergence without experts less that without layers, logarithms paired by window."""
    changed = json.loads(EXPERTS.FILE.read_text())["changed"]
    experts, layers = (np.log(changed[f"{count} {what}"]["kl"]) for what in ("experts by reap", "layers by kl"))
    found = compare(layers, experts)
    return found.low, found.high


def words_outside_8_bits() -> dict[str, set[str]]:
    """The words of `hierarchy` about a kind of task, of all compressions but those to 8 bits."""
    words: dict[str, set[str]] = {}
    for _, compressed, kind, word, *_ in rows(tables.written("verdicts")["verdicts"]):
        if not compressed.startswith("8 bits"):
            words.setdefault(kind, set()).add(word)
    return words


def over_influence(criterion: str) -> set[str]:
    """The texts on which a criterion is better than Block Influence with eight layers of Qwen removed."""
    found = [r for r in TEXTS.OnOneText.all(TEXTS.HERE) if r.measured_on.model.name == QWEN]
    return {r.measured_on.text for r in found if told(r.of(criterion, 8), r.of("bi", 8)) == "better"}


def nearly_one() -> int:
    """The transitions of Qwen that contract by less than two per cent."""
    home = tables.HOMES["residual_growth"] / "qwen2.5-coder-1.5b"
    rho = ContractionProfile.load(home / "contraction-0.01.json").rho[:-1]
    return int(((rho < 1) & (rho > 0.98)).sum())


@pytest.mark.parametrize(
    ("page", "words", "holds"),
    [
        ("1_contraction", "16 of them by less than two per cent", lambda: nearly_one() == 16),
        (
            "2_criteria",
            "in all six comparisons on SmolLM2; on Gemma it is better in two and worse in two; on the largest model "
            "it is worse in two",
            lambda: (
                influence_against_rho()
                == {"smollm2-135m": (6, 0), "gemma-3-270m": (2, 2), "qwen2.5-coder-1.5b": (0, 2)}
            ),
        ),
        (
            "2_criteria",
            "nobody knows beforehand, and in seven it is better",
            lambda: best_over_single() == (7, 0),
        ),
        (
            "2_criteria",
            "less than every other criterion by the intervals, and `bi` leaves the most",
            oracle_below_all,
        ),
        (
            "3_compression",
            "At 50 % no schedule by name is better than uniform on either of the two models. At 70 % ATP is, on both.",
            lambda: (
                not set().union(*better_than_uniform(2)) - {UP_DENSE}
                and all({"atp", "atp-search"} <= s for s in better_than_uniform(4))
            ),
        ),
        (
            "3_compression",
            "is better than uniform at both amounts on SmolLM2 and worse at 50 % on Gemma",
            lambda: (
                UP_DENSE in better_than_uniform(2)[0] & better_than_uniform(4)[0]
                and UP_DENSE not in better_than_uniform(2)[1]
            ),
        ),
        (
            "3_compression",
            "the correction alone leaves a lower perplexity than both together",
            lambda: max(corrected_over_both()) < 0,
        ),
        (
            "4_hierarchy",
            "by Wanda on all three models, without four layers and without four MLPs on the two smaller ones, and "
            "without eight attentions on Gemma 3",
            lambda: (
                repeats_more("") == {"layers − 4", "MLP − 4", "Wanda 50 %"}
                and repeats_more("gemma-3-270m") - repeats_more("") == {"attention − 8"}
                and repeats_more(QWEN) == {"Wanda 50 %"}
            ),
        ),
        (
            "4_hierarchy",
            "Outside the rows at 8 bits every verdict is the one word of its kind",
            lambda: set(map(len, words_outside_8_bits().values())) == {1},
        ),
        (
            "4_hierarchy",
            "in every row of the two smaller models, by the same test; on Qwen in four rows of seven",
            lambda: [drawn_repeat_less(folder) for folder in ("", "gemma-3-270m", QWEN)] == [7, 7, 4],
        ),
        (
            "4_hierarchy",
            "every interval of one holds the other's value",
            lambda: all(estimates_alike(folder) for folder in ("", "gemma-3-270m", QWEN)),
        ),
        (
            "6_recovery",
            "On Qwen mending is better than each of the other methods on every run of layers",
            lambda: all(
                row[-2:] == ["0", "0"] or "qwen" not in row[0] for row in rows(tables.written("mending")["beside"])
            ),
        ),
        (
            "6_recovery",
            "in all six runs of the first section healing lowered the loss by at least as much again",
            lambda: len(regained()) == 6 and all(healed >= mended for mended, healed in regained()),
        ),
        (
            "8_experts_and_states",
            "cost less than layers with two of eight gone; with one and with half of them gone the two",
            lambda: reap_over_layers(2)[1] < 0 and all(low < 0 < high for low, high in map(reap_over_layers, (1, 4))),
        ),
    ],
)
def test_a_claim_of_several_models_holds_of_the_committed_results(
    page: str, words: str, holds: Callable[[], bool]
) -> None:
    text = (tables.EXPERIMENTS / page / "README.md").read_text(encoding="utf-8")
    assert words in " ".join(text.split())
    assert holds()


ROUNDED = ["experiments/README.md", "docs/compression.md", "docs/differences.md", "docs/results.md"]
ROUNDED += [f"experiments/{chapter}/README.md" for chapter in ("3_compression", "4_hierarchy", "7_bounds")]


@pytest.mark.parametrize("page", ROUNDED)
def test_a_page_that_compares_roundings_says_that_the_weights_lie_on_a_grid(page: str) -> None:
    text = (tables.REPOSITORY / page).read_text(encoding="utf-8")
    assert re.search(r"on (a|their|grids?)\b[^.]* grids?\b|grids of|their grid", text)
    assert "#the-models" in text or "## The models" in text


def test_what_results_say_of_the_blend_and_of_rho_on_qwen_holds() -> None:
    text = " ".join((tables.REPOSITORY / "docs/results.md").read_text(encoding="utf-8").split())
    assert "so do we for the blend on all three texts of the table above, for ρ on WikiText and C4 alone" in text
    assert over_influence("blend") == {"builtin", "c4.jsonl", "wiki.test.raw"}
    assert over_influence("rho") == {"c4.jsonl", "wiki.test.raw"}
