"""Where to spend the sparsity: every schedule with Wanda at 50 % and 70 % (§6.4, Table 7), and the bits (§6.2).

    python experiments/3_compression/allocation/run.py [--model MODEL] [--text FILE]

The guidelines are there twice: with their default ceiling, and with the catastrophe threshold s* as measured on the
calibration text, Wanda by its first half and regret on the second. Their first rule stands alone too: the matrices into
the MLP of layer 0 dense, all others alike. Bits by A stand beside as many bits shared out evenly, and beside the same
layers the other way round. Writes allocation.json, bits.json and their figures beside this file, row by row: a row that
stands there is not measured again.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import DITHERED, Model, Other, draw, halves, run_command, texts
from experiments.compressions import (
    CompressionRow,
    CompressionTable,
    Setting,
    beside,
    compressions_figure,
    evaluate_compressions,
    setting,
)
from experiments.schedules import (
    Budget,
    alpha_pruning,
    atp_search,
    guidelines,
    lyapunov,
    lyapunov_budget,
    owl,
    wide_where_amplified,
)
from experiments.statements import interval, percent, short, table
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling

HERE = Path(__file__).parent
WIDTHS = ((3, 4), (4, 8))
UP_DENSE = "layer 0 into its MLP dense"
STARRED = "guidelines, s*"  # the last of each budget, where it can be met


def main(model: Model = Model(), text: str = "builtin", unseen: Other = None, tokens: int = 4096) -> None:
    folder = model.folder(HERE)
    loaded = model.load()
    sizes = {"calibration": tokens // 2, "evaluation": tokens, "context": 512}
    calibration, evaluation = texts(loaded, text, **sizes, unseen=unseen)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    settings = {"bits": list(bits(loaded.model, profile))}
    if DITHERED not in model.name:
        ceiling = threshold(loaded.model, calibration)
        print(ceiling.headline())
        shares = (sparsities(loaded.model, share, calibration, profile, ceiling) for share in (0.5, 0.7))
        settings["allocation"] = [setting for each in shares for setting in each]
    for name, rows in settings.items():
        found = evaluate_compressions(loaded.model, rows, calibration, evaluation, path=folder / f"{name}.json")
        draw(folder, {name: compressions_figure(found)})


def threshold(model: PreTrainedModel, calibration: lp.TokenBatch) -> lp.sensitivity.Sensitivity:
    """s* by calibration text alone."""
    first, second = halves(calibration)
    return lp.measure_sensitivity(model, second, studies=["threshold"], calibration=first)


def sparsities(
    model: PreTrainedModel,
    budget: float,
    calibration: lp.TokenBatch,
    profile: ContractionProfile,
    ceiling: lp.sensitivity.Sensitivity,
) -> Iterator[Setting]:
    for schedule in ("uniform", "atp"):
        yield Setting("wanda", schedule, sparsity=budget)
    yield Setting("wanda", atp_search(model, budget, calibration))
    yield Setting("wanda", owl(model, budget, calibration))
    yield Setting("wanda", alpha_pruning(model, budget))
    yield Setting("wanda", guidelines(model, budget))
    yield Setting("wanda", replace(guidelines(model, budget, protected=1, extra=0.0), schedule=UP_DENSE))
    for pooling in get_args(Pooling):
        pooled = profile.pooled(pooling)
        yield Setting("wanda", _named(lyapunov(model, budget, pooled), "lyapunov", pooling))
        for reading in get_args(Budget):
            chosen = lyapunov_budget(model, budget, pooled, reading=reading)
            yield Setting("wanda", _named(chosen, "lyapunov-budget", reading, pooling))
    try:
        chosen = guidelines(model, budget, ceiling=ceiling)
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
            chosen = wide_where_amplified(model, (low + high) / 2, profile.pooled(pooling), low=low, high=high)
            yield Setting("rtn", _named(chosen, f"{low}/{high} by rho", pooling), group_size=64)
            turned = replace(chosen, amount=low + high - chosen.amount)
            yield Setting("rtn", _named(turned, f"{low}/{high} reversed", pooling), group_size=64)


def _named(allocation: Allocation, *words: str) -> Allocation:
    return replace(allocation, schedule=", ".join(words))


def written(folder: Path = HERE) -> dict[str, str]:
    widths = CompressionTable.load(folder / "bits.json")
    of_widths = {"bits": widths_table(widths), "bits by A": by_amplification(widths)}
    if not (folder / "allocation.json").exists():  # a dithered model, which is rounded alone
        return {"setting": setting(widths), **of_widths}
    shares = CompressionTable.load(folder / "allocation.json")
    return {
        "setting": setting(shares),
        "schedules": schedules(shares),
        "atp": beside_atp(shares),
        "up dense": ", ".join(
            f"{beside(of[UP_DENSE], of['uniform'])} at {percent(budget)}"
            for budget, of in by_budget(shares).items()
            if UP_DENSE in of
        ),
        "star": percent(next(float(r.parameters["ceiling"]) for r in shares.rows if r.allocation == STARRED)),
        **of_widths,
    }


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


def beside_atp(found: CompressionTable) -> str:
    """The search of ATP beside its default slope, and the clamped schedules by ρ beside ATP with its search."""
    rows: list[list[object]] = []
    for budget, of in by_budget(found).items():
        searched = of["atp-search"]
        slopes = [_parameter(row, "beta") for row in (searched, of["atp"])]
        lyapunov = [beside(of[f"lyapunov, {pooling}"], searched) for pooling in get_args(Pooling)]
        rows.append([percent(budget), *slopes, beside(searched, of["atp"]), *lyapunov])
    head = ("sparsity", "β of the search", "default β", "search / default")
    return table((*head, *(f"lyapunov, {pooling} / search" for pooling in get_args(Pooling))), rows)


def _parameter(row: CompressionRow, name: str) -> str:
    return short(float(row.parameters[name]))


def widths_table(found: CompressionTable) -> str:
    """The committed rows call A "rho", of which it is the product over the later layers."""
    rows = [
        [r.allocation.replace("by rho", "by A"), short(r.amount), r.perplexity, interval(r.degradation, r.low, r.high)]
        for r in found.rows
    ]
    return table(["widths", "mean bits", "perplexity", "/ dense"], rows)


def by_amplification(found: CompressionTable) -> str:
    """Bits by A over the same widths the other way round, and over as many bits evenly."""
    rows = {(row.allocation, row.amount): row for row in found.rows}
    lines = []
    for low, high in WIDTHS:
        mean = (low + high) / 2
        for pooling in get_args(Pooling):
            chosen, turned = (rows[f"{low}/{high} {way}, {pooling}", mean] for way in ("by rho", "reversed"))
            even = rows.get(("uniform", mean))
            lines.append([f"{low} or {high}", pooling, beside(chosen, turned), even and beside(chosen, even)])
    return table(["bits", "pooling", "by A / reversed", "by A / evenly"], lines)


if __name__ == "__main__":
    run_command(main, HERE / "bits.json", written)
