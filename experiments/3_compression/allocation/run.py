"""Where to spend the sparsity: every schedule with Wanda at 50 % and 70 % (§6.4, Table 7), and the bits (§6.2).

    python experiments/3_compression/allocation/run.py [--model MODEL] [--text FILE]

The guidelines are there twice: with their default ceiling, and with the catastrophe threshold s* as measured on the
calibration text, Wanda by its first half and regret on the second. Bits by ρ stand beside as many bits shared out
evenly, and beside the same layers the other way round. Writes allocation.json, bits.json and their figures beside this
file, row by row: a row that stands there is not measured again. What they say goes into README.md by `make tables`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, halves, load, of_model, texts
from experiments.compressions import (
    ALIKE,
    CompressionRow,
    CompressionTable,
    Setting,
    against,
    beside,
    compressions_figure,
    evaluate_compressions,
    grouped,
    judged,
    setting,
    told,
)
from experiments.statements import bullets, interval, percent, short, stated, table
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.amplification import Reading
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling

HERE = Path(__file__).parent
SCHEDULES = ("uniform", "atp", "atp-search", "owl", "alpha-pruning", "guidelines")
WIDTHS = ((3, 4), (4, 8))
STARRED = "guidelines, s*"  # the last of each budget, where it can be met
NAMES = (
    *SCHEDULES,
    *(
        ", ".join(words)
        for pooling in get_args(Pooling)
        for words in (("lyapunov", pooling), *(("lyapunov-budget", r, pooling) for r in get_args(Reading)))
    ),
)
# What Table 7 finds against uniform (ATP: the paper's own run; a hundredth is read as no difference), and §6.4 of the
# clamped schedule against ATP.
PAPER = {
    0.5: {
        "atp-search": (ALIKE, "the paper, LLaMA-2-7B: 6.88 against 6.94"),
        "owl": ("worse", "the paper: 31.6 against 26.0 on Qwen3.5-2B, 9.4 against 8.4 on Mistral-7B"),
    },
    0.7: {"atp-search": ("better", "the paper, LLaMA-2-7B: 22.3 against 70.5")},
}
MATCHED = {0.7: (" (the paper, LLaMA-2-7B: 20.2 against 20.1)", ALIKE)}


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 4096,
) -> None:
    folder = of_model(HERE, model)
    loaded = load(model, device, dtype)
    calibration, evaluation = texts(loaded, text, calibration=tokens // 2, evaluation=tokens, context=512)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    ceiling = threshold(loaded.model, calibration)
    print(ceiling.headline())
    settings = [setting for s in (0.5, 0.7) for setting in sparsities(loaded.model, s, profile, ceiling)]
    shares = evaluate_compressions(loaded.model, settings, calibration, evaluation, path=folder / "allocation.json")
    widths = evaluate_compressions(
        loaded.model, bits(loaded.model, profile), calibration, evaluation, path=folder / "bits.json"
    )
    draw(folder, {"allocation": compressions_figure(shares), "bits": compressions_figure(widths)})
    print(shares, widths, sep="\n\n")


def threshold(model: PreTrainedModel, calibration: lp.TokenBatch) -> lp.sensitivity.Sensitivity:
    """s* by calibration text alone."""
    first, second = halves(calibration)
    return lp.measure_sensitivity(model, second, studies=["threshold"], calibration=first)


def sparsities(
    model: PreTrainedModel, budget: float, profile: ContractionProfile, ceiling: lp.sensitivity.Sensitivity
) -> Iterator[Setting]:
    for schedule in SCHEDULES:
        yield Setting("wanda", schedule, sparsity=budget)
    for pooling in get_args(Pooling):
        for schedule, reading in [("lyapunov", {}), *(("lyapunov-budget", {"reading": r}) for r in get_args(Reading))]:
            chosen = lp.allocate(model, schedule, budget, profile=profile.pooled(pooling), **reading)
            yield Setting("wanda", _named(chosen, schedule, *reading.values(), pooling))
    try:
        chosen = lp.allocate(model, "guidelines", budget, ceiling=ceiling)
    except lp.LyapunovPruneError as error:  # s* may lie below the budget, or below all that was tried
        print(f"guidelines under s* at {budget:g}: {error}")
    else:
        yield Setting("wanda", replace(chosen, schedule=STARRED))


def bits(model: PreTrainedModel, profile: ContractionProfile) -> Iterator[Setting]:
    """Half of the layers wide: those of largest A, by either pooling, and then the others instead."""
    for even in (3, 4, 6, 8):
        yield Setting("rtn", bits=even, group_size=64)
    for low, high in WIDTHS:
        for pooling in get_args(Pooling):
            chosen = lp.allocate(model, "bits", (low + high) / 2, profile=profile.pooled(pooling), low=low, high=high)
            yield Setting("rtn", _named(chosen, f"{low}/{high} by rho", pooling), group_size=64)
            turned = replace(chosen, amount=low + high - chosen.amount)
            yield Setting("rtn", _named(turned, f"{low}/{high} reversed", pooling), group_size=64)


def _named(allocation: Allocation, *words: str) -> Allocation:
    return replace(allocation, schedule=", ".join(words))


def written(folder: Path = HERE) -> dict[str, str]:
    shares = CompressionTable.load(folder / "allocation.json")
    parts = {"setting": setting(shares), "schedules": schedules(shares), "verdict": verdict(shares)}
    if folder == HERE:
        parts["summary"] = summary([shares, *map(CompressionTable.load, sorted(HERE.glob("*/allocation.json")))])
    if not (folder / "bits.json").is_file():
        return {**parts, "bits": "Not measured yet.\n", "verdict-bits": bullets("None yet.")}
    widths = CompressionTable.load(folder / "bits.json")
    return {**parts, "bits": widths_table(widths), "verdict-bits": verdict_bits(widths)}


def summary(tables: list[CompressionTable]) -> str:
    """Which schedules are told from uniform on every model that was measured, and which way."""
    lines = []
    for budget in by_budget(tables[0]):
        every = [by_budget(found)[budget] for found in tables]
        common = [name for name in NAMES if name != "uniform" and all(name in rows for rows in every)]
        said = {name: {told(rows[name], rows["uniform"]) for rows in every} for name in common}
        alike = {name: words.pop() if len(words) == 1 else "not alike" for name, words in said.items()}
        lines.append(
            f"{percent(budget)}, against uniform, alike on {' and '.join(_model(f) for f in tables)}: {grouped(alike)}."
        )
    return bullets(*lines)


def _model(found: CompressionTable) -> str:
    return f"{found.measured_on.model.name} ({len(found.rows[0].windows)} windows)"


def by_budget(found: CompressionTable) -> dict[float, dict[str, CompressionRow]]:
    """The rows of each budget by the name of their schedule; all are of one method."""
    budgets = dict.fromkeys(row.amount for row in found.rows)
    return {b: {row.allocation: row for row in found.rows if row.amount == b} for b in budgets}


def schedules(found: CompressionTable) -> str:
    """Perplexity of every schedule, and its quotient by that of uniform."""
    every = by_budget(found)
    head = ["schedule", *(word for b in every for word in (f"perplexity, {percent(b)}", "/ uniform"))]
    lines: list[list[object]] = []
    for name in dict.fromkeys(row.allocation for row in found.rows):
        pairs = ((rows.get(name), rows["uniform"]) for rows in every.values())
        cells = ((r and r.perplexity, None if r in (None, even) else beside(r, even)) for r, even in pairs)
        lines.append([name, *(cell for pair in cells for cell in pair)])
    return table(head, lines)


def verdict(found: CompressionTable) -> str:
    """Every schedule against uniform, ATP with its search, the rules with s*, and the clamped schedule by ρ."""
    lines = [f"One model, {found.measured_on.model.name}; the intervals are of {len(found.rows[0].windows)} windows."]
    for budget, rows in by_budget(found).items():
        lines += _said(budget, rows)
    return bullets(*lines)


def _said(budget: float, rows: dict[str, CompressionRow]) -> Iterator[str]:
    """What the rows of a budget that are measured so far say."""
    at, even = percent(budget), rows["uniform"]
    said = {name: told(row, even) for name, row in rows.items() if row is not even}
    yield f"{at}, against uniform: {grouped(said)}."
    waiting = [name for name in NAMES if name not in rows]
    if waiting:
        yield f"{at}, not measured yet: {', '.join(f'`{name}`' for name in waiting)}."
    for name, (theirs, numbers) in PAPER[budget].items():
        if name in said:
            line = f"{at}: `{name}` is {said[name]}, {interval(*against(rows[name], even))} of uniform ({numbers})."
            yield stated(line, judged(said[name], theirs))
    if "atp-search" in rows:
        yield (
            f"{at}: the search of ATP takes β = {_parameter(rows['atp-search'], 'beta')}, the default is "
            f"{_parameter(rows['atp'], 'beta')}: {_compared(rows['atp-search'], rows['atp'])} ATP without it."
        )
    if not waiting:
        yield f"{at}: {_rules(rows['guidelines'], rows.get(STARRED))}."
    for name in (f"lyapunov, {pooling}" for pooling in get_args(Pooling)):
        if {name, "atp-search"} <= rows.keys():
            line = f"{at}: `{name}` is {_compared(rows[name], rows['atp-search'])} ATP with its search"
            numbers, theirs = MATCHED.get(budget, ("", ""))
            yield stated(f"{line}{numbers}.", theirs and judged(told(rows[name], rows["atp-search"]), theirs))


def _rules(default: CompressionRow, starred: CompressionRow | None) -> str:
    """The guidelines with their default ceiling and with s*."""
    if starred is None:
        return "the guidelines cannot meet the budget under the measured s\\*"
    star, usual = (_parameter(row, "ceiling") for row in (starred, default))
    if starred.windows == default.windows:
        return f"the guidelines under s\\* = {star} are those under the default of {usual}: neither binds"
    return f"the guidelines under s\\* = {star} are {_compared(starred, default)} those under the default of {usual}"


def _parameter(row: CompressionRow, name: str) -> str:
    return short(float(row.parameters[name]))


def _compared(row: CompressionRow, other: CompressionRow) -> str:
    return f"{told(row, other)}, {interval(*against(row, other))} of"


def widths_table(found: CompressionTable) -> str:
    rows = [[r.allocation, short(r.amount), r.perplexity, interval(r.degradation, r.low, r.high)] for r in found.rows]
    return table(["widths", "mean bits", "perplexity", "/ dense"], rows)


def verdict_bits(found: CompressionTable) -> str:
    """Bits by ρ against the same the other way round, and against as many evenly."""
    rows = {(row.allocation, row.amount): row for row in found.rows}
    lines = []
    for low, high in WIDTHS:
        mean = (low + high) / 2
        for pooling in get_args(Pooling):
            chosen, turned = (rows[f"{low}/{high} {way}, {pooling}", mean] for way in ("by rho", "reversed"))
            even = rows.get(("uniform", mean))
            evenly = f"; {_compared(chosen, even)} {mean:g} bits evenly" if even else ""
            line = (
                f"{low} or {high} bits by ρ, {pooling} pooling: {_compared(chosen, turned)} the same widths the other "
                f"way round{evenly}."
            )
            lines.append(stated(line, judged(told(chosen, turned), "better")))
    return bullets(*lines)


if __name__ == "__main__":
    typer.run(main)
