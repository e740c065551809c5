"""Tables 1 to 4 of the paper, a column or a row for each model that `python -m experiments.all` has measured.

    python experiments/1_contraction/summary/run.py

Measures nothing: it prints what stands in experiments/columns/ beside the paper's rows, and `make tables` writes it
into the page of the chapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.columns import ALPHAS, Column, mean_accuracy, paired_difference
from experiments.common import show
from experiments.published import BLENDS, MODELS, REMOVABLE, REMOVALS
from experiments.statements import interval, runs, short, table

COLUMNS = Path(__file__).parents[2] / "columns"
FEWEST = 5  # models, for a correlation whose leave-one-out values still rest on four
RANDOM = "random"
COUNTS = (4, 8)  # layers removed, of Table 3
COMPARED = ("blend", "bi", "rho", "angular")
BEARABLE = (0.1, 0.2, 0.5)  # of the dense perplexity, by which a removed layer may raise it


def columns() -> list[Column]:
    return sorted((Column.load(path) for path in COLUMNS.glob("*.json")), key=lambda column: column.parameters)


def written() -> dict[str, str]:
    """Every table, by the name of its marker."""
    own = columns()
    return {
        "measured-on": measured_on(own),
        "table-1": table_1(own),
        "table-2": table_2(own),
        "table-3": table_3(own),
        "table-4": table_4(own),
        "accuracy": accuracy(own),
        "paired": paired(own),
        "regret": regret(own),
        "removable": removable(own),
        "across": across(own),
        "fragility": fragility(own),
    }


def measured_on(own: list[Column]) -> str:
    lines = []
    for c in own:
        on, contraction = c.calibrated_on, c.contraction
        seeds = ", ".join(map(str, contraction.seeds))
        lines.append(
            f"- {c.name}: {c.measured_on.line()}; ρ (ε = {contraction.epsilon:g}, seeds {seeds}), Block Influence and "
            f"Wanda's norms on {on.tokens} tokens of {on.text} ({on.split}, {on.text_hash[:12]}).\n"
        )
    return "".join(lines)


def table_1(own: list[Column]) -> str:
    """A row a quantity, a column a model; — where the paper prints nothing or our copy has lost it.

    The paper's degradations are those of its first version (`published`).
    """
    rows: dict[str, list[Any]] = {
        "parameters": [*(millions(c.parameters) for c in own), *(m.parameters for m in MODELS)],
        "layers": [*(c.layers for c in own), *(m.layers for m in MODELS)],
        "width": [*(c.width for c in own), *(m.width for m in MODELS)],
        "architecture": [*(c.architecture for c in own), *(m.architecture for m in MODELS)],
        "perplexity": [*(f"{c.perplexity:.4g}" for c in own), *(f"{m.perplexity:g}" for m in MODELS)],
        "contracting": [f"{a}/{b}" for a, b in (x.contraction.contracting for x in own)]
        + [f"{a}/{b}" for a, b in (m.contracting for m in MODELS)],
        "largest ρ (its layer)": [
            *(f"{short(float(c.contraction.rho.max()))} ({c.contraction.rho.argmax()})" for c in own),
            *(f"{m.rho:.2f}" for m in MODELS),
        ],
        "largest ρ, token pooling": [
            *(f"{short(float(c.contraction.rho_token.max()))} ({c.contraction.rho_token.argmax()})" for c in own),
            *[None] * len(MODELS),
        ],
        "norm growth K": [*(c.contraction.growth for c in own), *(m.growth and f"{m.growth[0]:g}" for m in MODELS)],
        "50 % Wanda, perplexity / dense": [
            *(c.pruning and interval(c.pruning.degradation, c.pruning.low, c.pruning.high) for c in own),
            *(m.degradation for m in MODELS),
        ],
        "the same, calibrated": [
            *[None] * len(own),
            *(m.calibrated and m.calibrated[0] / m.calibrated[1] for m in MODELS),
        ],
        "spread of components, naive": [
            *(c.pruning and c.pruning.spread("weight-only") for c in own),
            *[None] * len(MODELS),
        ],
        "spread of components, Wanda": [*(c.pruning and c.pruning.spread("wanda") for c in own), *[None] * len(MODELS)],
        "s*": [*(star(c) for c in own), *(f"{m.threshold:.2f}" for m in MODELS)],
        "bound checks": [*(c.bounds and c.bounds.checks for c in own), *(m.checks for m in MODELS)],
        "violations": [*(c.bounds and c.bounds.violations for c in own), *(m.violations for m in MODELS)],
    }
    return table(["", *names(own)], ([name, *values] for name, values in rows.items()))


def names(own: list[Column]) -> list[str]:
    return [*(f"**{c.name}**" for c in own), *(m.name for m in MODELS)]


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"


def table_2(own: list[Column]) -> str:
    """s*, by width."""
    rows: list[tuple[str, int, float | None]] = [(m.name, m.width, m.threshold) for m in MODELS]
    rows += [(f"**{c.name}**", c.width, c.pruning.threshold if c.pruning else None) for c in own]
    stars = ([n, d, s and f"{s:.2f}", s and f"{1 - s:.2f}"] for n, d, s in sorted(rows, key=lambda row: row[1]))
    return table(["model", "width", "s*", "1 − s*"], stars)


def star(column: Column) -> str | None:
    """s*, or what is known of it; None where it has not been measured."""
    if column.pruning is None:
        return None
    swept = min(map(float, column.pruning.first_layer))
    return f"below {swept:.2f}" if column.pruning.threshold is None else f"{column.pruning.threshold:.2f}"


def table_3(own: list[Column]) -> str:
    """Perplexity and mean accuracy with four and eight layers removed; of random draws the median perplexity."""
    rows: list[list[object]] = []
    for c in own:
        rows.append([f"**{c.name}**", "dense", *[f"{c.perplexity:.4g}"] * 2, *[percent(c, "dense", 0)] * 2])
        sets = c.removal.sets if c.removal else ()
        for criterion in dict.fromkeys(criterion_of(r.criterion) for r in sets):
            cells: list[object] = []
            for count in COUNTS:
                found = [r for r in sets if criterion_of(r.criterion) == criterion and r.count == count]
                if len(found) == 1:
                    ratio = [c.perplexity * x for x in (found[0].low, found[0].high)]
                    cells.append(interval(found[0].perplexity, *ratio))
                else:
                    drawn = [r.perplexity for r in found]
                    cells.append(interval(float(np.median(drawn)), min(drawn), max(drawn)) if drawn else None)
            scored = criterion if criterion != RANDOM else f"{RANDOM} 0"
            rows.append([f"**{c.name}**", criterion, *cells, *(percent(c, scored, count) for count in COUNTS)])
    for model in dict.fromkeys(model for model, _, _ in REMOVALS):
        for criterion in dict.fromkeys(criterion for name, criterion, _ in REMOVALS if name == model):
            printed = [REMOVALS.get((model, criterion, 0 if criterion == "dense" else n)) for n in COUNTS]
            rows.append([model, criterion, *(p and f"{p[0]:g}" for p in printed), *(p and p[1] for p in printed)])
    head = [f"{what}, {count} removed" for what in ("perplexity", "accuracy") for count in COUNTS]
    return table(["model", "criterion", *head], rows)


def table_4(own: list[Column]) -> str:
    """The paper's blend over α at two depths: the layers that go, perplexity and mean accuracy."""
    rows: list[list[object]] = []
    for c in own:
        sets = {(r.count, r.criterion): r for part in (c.removal, c.blends) if part for r in part.sets}
        for count in COUNTS:
            for alpha, name in ALPHAS.items():
                found = sets.get((count, name))
                if found is None:
                    rows.append([f"**{c.name}**", count, f"{alpha:g}", None, None, None])
                    continue
                ratio = [c.perplexity * x for x in (found.low, found.high)]
                same = {a.criterion for a in c.accuracy.answers if a.layers == found.layers} if c.accuracy else ()
                shown = interval(found.perplexity, *ratio), next((percent(c, one, count) for one in same), None)
                rows.append([f"**{c.name}**", count, f"{alpha:g}", runs(found.layers), *shown])
    for (count, weight), (layers, perplexity, right) in BLENDS.items():
        rows.append(["LLaMA-2-7B", f"{count}", weight, f"*{layers}*", f"*{perplexity:g}*", f"*{right:g}*"])
    return table(["model", "removed", "α", "layers", "perplexity", "accuracy"], rows)


def percent(column: Column, criterion: str, count: int) -> str | None:
    """Mean accuracy over the tasks, in per cent, with its interval."""
    answers = column.accuracy.of(criterion, count) if column.accuracy else []
    return interval(*(100 * x for x in mean_accuracy(answers))) if answers else None


def accuracy(own: list[Column]) -> str:
    """Accuracy by task in per cent with Wilson's interval, a row a model and set of layers."""
    rows: list[list[object]] = []
    tasks = list(dict.fromkeys(t.name for c in own if c.accuracy for t in c.accuracy.tasks))
    for c in own:
        if c.accuracy is None:
            continue
        shares: dict[tuple[str, int], dict[str, str]] = {}
        for a in c.accuracy.answers:
            share = interval(*(100 * float(x) for x in (a.items.mean(), *a.interval)))
            shares.setdefault((a.criterion, a.count), {})[a.task] = share
        rows += [[f"**{c.name}**", *which, *(by_task.get(t) for t in tasks)] for which, by_task in shares.items()]
        chance = {t.name: 100 * t.chance for t in c.accuracy.tasks}
        rows.append([f"**{c.name}**", "guessing", "", *(chance.get(t) for t in tasks)])
    return table(["model", "criterion", "removed", *tasks], rows)


def paired(own: list[Column]) -> str:
    """Mean differences in accuracy, paired by item, of the criteria and of each from the dense model."""
    rows = []
    for c in own:
        for count in COUNTS:
            for one, other in (*((name, "dense") for name in COMPARED), *itertools.combinations(COMPARED, 2)):
                answers = c.accuracy.of(one, count) if c.accuracy else []
                reference = c.accuracy.of(other, 0 if other == "dense" else count) if c.accuracy else []
                if answers and reference:
                    mean, low, high, p = paired_difference(answers, reference)
                    change = f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
                    rows.append([f"**{c.name}**", count, f"{one} − {other}", change, p])
    return table(["model", "removed", "difference", "points of accuracy", "p"], rows)


def criterion_of(name: str) -> str:
    return RANDOM if name.startswith(RANDOM) else name


def regret(own: list[Column]) -> str:
    """Spearman's correlation, over layers, of the regret of removing one layer with what may predict it."""
    rows = [
        [f"**{c.name}**", r.layers, r.score, f"{r.spearman:+.2f} ({r.low:+.2f} to {r.high:+.2f})", r.p]
        for c in own
        for r in (c.removal.correlations if c.removal else ())
    ]
    return table(["model", "layers", "score", "Spearman", "p"], rows)


def removable(own: list[Column]) -> str:
    """How many layers can go alone at little regret, and where ρ puts the layers that cost least and most.

    Places by ρ count from the layer whose ρ is nearest to one, those by regret from the least.
    """
    rows: list[list[object]] = []
    for c in own:
        if c.removal is not None:
            regret, far = c.removal.regret, np.abs(c.contraction.rho - 1)
            by_regret, by_rho = (stats.rankdata(x, "ordinal") for x in (regret, far))
            few = [f"{(regret < share * c.perplexity).sum()} of {c.layers}" for share in BEARABLE]
            most = np.argsort(-regret)[:2]
            nearest = int(far.argmin())
            worst = f"{most[0]}, {most[1]}", f"{by_rho[most[0]]}, {by_rho[most[1]]}"
            rows.append([f"**{c.name}**", *few, nearest, int(by_regret[nearest]), *worst])
    printed = [f"*{REMOVABLE[0]} of {REMOVABLE[1]}*, limit lost", None, None]
    rows.append(["LLaMA-2-7B", *printed, "*12*", "*1*", "*0, 1*", None])
    limits = [f"regret below {100 * share:.0f} %" for share in BEARABLE]
    layers = ["ρ nearest to one: layer", "its place by regret", "most regret: layers", "their places by ρ"]
    return table(["model", *limits, *layers], rows)


def fragility(own: list[Column]) -> str:
    """The Compression Fragility Index, `ρ_max^a / width^b`, fitted to 1 − s* and each model left out once.

    The paper's formula is lost in our copy but for its two terms, instability and a penalty of width. a and b are
    fitted by least squares of the logarithms. A rank error is how far a model that is left out lands from its place.
    """
    ours = [(c.name, float(c.contraction.rho.max()), c.width, c.pruning.threshold) for c in own if c.pruning]
    theirs = [(m.name, m.rho, m.width, m.threshold) for m in MODELS]
    rows: list[list[object]] = []
    for label, models in (("the paper's", theirs), ("both", [*ours, *theirs])):
        known = [m for m in models if m[3] is not None]
        names, *columns = zip(*known, strict=True)
        rho, width, star = (np.array(values, dtype=float) for values in columns)
        terms = np.stack([np.ones(len(names)), np.log(rho), -np.log(width)], 1)
        wanted = np.log(1 - star)
        order = stats.rankdata(wanted)
        fitted = np.linalg.lstsq(terms, wanted, rcond=None)[0]
        errors = []
        for k in range(len(names)):
            kept = np.arange(len(names)) != k
            index = terms @ np.linalg.lstsq(terms[kept], wanted[kept], rcond=None)[0]
            errors.append(abs(stats.rankdata(np.where(kept, wanted, index))[k] - order[k]))
        whole = stats.spearmanr(terms @ fitted, wanted)
        worst = int(np.argmax(errors))
        rows.append(
            [
                f"{label}, {len(names)}",
                *map(float, fitted[1:]),
                f"{whole.statistic:+.2f}",
                float(whole.pvalue),
                float(np.mean(errors)),
                f"{short(float(errors[worst]))} ({names[worst]})",
            ]
        )
    rows.append(["as the paper prints it, 6", None, None, None, None, "*1.0*", "*3 (GPT-2 Small)*"])
    head = ["models", "a", "b", "Spearman, fitted", "p", "mean rank error, left out", "largest"]
    return table(head, rows)


def across(own: list[Column]) -> str:
    """Correlations across models: of the paper's six, and with those of the columns that have both numbers."""
    properties = {
        "width": ([float(m.width) for m in MODELS], [float(c.width) for c in own]),
        "largest ρ": ([m.rho for m in MODELS], [float(c.contraction.rho.max()) for c in own]),
        "share of transitions that contract": (
            [a / b for a, b in (m.contracting for m in MODELS)],
            [a / b for a, b in (c.contraction.contracting for c in own)],
        ),
    }
    ours = [c.pruning.threshold if c.pruning and c.pruning.threshold is not None else np.nan for c in own]
    theirs = [m.threshold for m in MODELS]
    rows = []
    for name, (paper, measured) in properties.items():
        known = [(x, y) for x, y in zip(measured, ours, strict=True) if np.isfinite(y)]
        rows.append([f"s* with {name}", "the paper's", *spearman(list(zip(paper, theirs, strict=True)))])
        rows.append([f"s* with {name}", "ours", *spearman(known)])
        rows.append([f"s* with {name}", "both", *spearman([*zip(paper, theirs, strict=True), *known])])
    return table(["correlation", "models", "n", "Spearman", "leaving one model out", "p"], rows)


def spearman(pairs: Iterable[tuple[float, float]]) -> tuple[int, str, str, str]:
    """Number of models, rank correlation, its range with any one of them left out, and p; a note where they are few."""
    pairs = list(pairs)
    if len(pairs) < FEWEST:
        return len(pairs), f"not computed below {FEWEST} models", "", ""
    whole = stats.spearmanr(*zip(*pairs, strict=True))
    without = [
        stats.spearmanr(*zip(*rest, strict=True)).statistic for rest in itertools.combinations(pairs, len(pairs) - 1)
    ]
    return (
        len(pairs),
        f"{whole.statistic:+.2f}",
        f"{min(without):+.2f} to {max(without):+.2f}",
        short(float(whole.pvalue)),
    )


if __name__ == "__main__":
    show(written())
