"""What the structural-sensitivity paper's abstract claims, beside what was measured here; docs/results.md shows it."""

from __future__ import annotations

import importlib

import numpy as np

from experiments.amplification import PAPER as DRIFT
from experiments.amplification import AmplificationDrift
from experiments.columns import Column, Removed
from experiments.compressions import ALIKE, apart, judged
from experiments.published import MODELS, RHO_OVER_BI, SPREAD_NAIVE, SPREAD_WANDA
from experiments.statements import bullets, short, signed, span, stated, table, verdict

DRIFTS = importlib.import_module("experiments.4_hierarchy.drift.run")
NAMED = ("GPT-2 Small", "Mistral-7B", "Qwen3-8B")
REMOVED = 8
WRECKED = 1000  # times the dense perplexity, from where on criteria are not compared


def written() -> dict[str, str]:
    columns: list[Column] = importlib.import_module("experiments.1_contraction.summary.run").columns()
    drift: list[tuple[str, AmplificationDrift]] = DRIFTS.of_all_models()
    return {"claims": claims(columns, drift), "verdict": verdicts(columns, drift)}


def claims(columns: list[Column], drift: list[tuple[str, AmplificationDrift]]) -> str:
    """A row a claim, a column a model."""
    theirs = ", ".join(f"{m.rho:g} ({m.name})" for m in MODELS if m.name in NAMED)
    rows: list[list[object]] = [
        ["largest ρ (its layer)", theirs, *(f"{short(largest(c))} ({c.contraction.rho.argmax()})" for c in columns)],
    ]
    found = {
        (name, pooling, result.measured_on.model.name): f"{signed(value)} ({signed(low)} to {signed(high)})"
        for name, result in drift
        for pooling, value, low, high in correlations(result)
    }
    for name, pooling in dict.fromkeys(key[:2] for key in found):
        own = [found.get((name, pooling, c.name)) for c in columns]
        rows.append([f"Spearman of A with drift, {name}, {pooling} pooling", f"{signed(DRIFT)}, if of 1 − CKA", *own])
    for words, method, paper in (
        ("naive", "weight-only", short(SPREAD_NAIVE)),
        ("Wanda", "wanda", span(SPREAD_WANDA)),
    ):
        spreads = [c.pruning.spread(method) if c.pruning else None for c in columns]
        rows.append([f"most / least regret of a component, {words}", paper, *spreads])
    ratios = [bi_over_rho(c) for c in columns]
    rows.append([f"perplexity by Block Influence / by ρ, {REMOVED} removed", RHO_OVER_BI, *ratios])
    return table(["", "the paper", *(c.name for c in columns)], rows)


def largest(column: Column) -> float:
    return float(column.contraction.rho.max())


def correlations(result: AmplificationDrift) -> list[tuple[str, float, float, float]]:
    """Of drift with downstream amplification A: pooling, Spearman, its 95 % interval by layer."""
    frame = result.to_frame()
    rows = frame[frame["drift with"] == "A"]
    return [(r.pooling, float(r.spearman), float(r.low), float(r.high)) for _, r in rows.iterrows()]


def by_criterion(column: Column) -> dict[str, Removed]:
    """What was measured with `REMOVED` layers removed."""
    sets = column.removal.sets if column.removal else ()
    return {r.criterion: r for r in sets if r.count == REMOVED}


def bi_over_rho(column: Column) -> float | None:
    found = by_criterion(column)
    return found["bi"].perplexity / found["rho"].perplexity if {"bi", "rho"} <= found.keys() else None


def verdicts(columns: list[Column], drift: list[tuple[str, AmplificationDrift]]) -> str:
    lines = []
    most = max(m.rho for m in MODELS)
    for c in columns:
        said = f"{c.name}: the largest ρ is {short(largest(c))} (the paper's {len(MODELS)} models: up to {most:g})."
        lines.append(verdict(largest(c) <= most, said))
    for name, result in drift:
        for pooling, value, low, high in correlations(result):
            said = f"{result.measured_on.model.name}, {name}, {pooling} pooling: Spearman of A with drift "
            lines.append(DRIFTS.beside_the_paper(said, value, low, high))
    for c in columns:
        if c.pruning:
            naive, wanda = (c.pruning.spread(method) for method in ("weight-only", "wanda"))
            if np.isnan([naive, wanda]).any():
                said = f"{c.name}: no spread of components can be given, because pruning one of them costs nothing"
                lines.append(f"**Not decided:** {said}.")
            else:
                said = f"{c.name}: Wanda shrinks the spread of components from {short(naive)}- to {short(wanda)}-fold"
                theirs = f"the paper: from {short(SPREAD_NAIVE)}- to {span(SPREAD_WANDA)}-fold"
                lines.append(verdict(wanda < naive, f"{said} ({theirs})."))
        if (ratio := bi_over_rho(c)) is not None:
            rho, bi = (by_criterion(c)[name] for name in ("rho", "bi"))
            over = [r.perplexity / c.perplexity for r in (rho, bi)]
            less = f"{short(ratio)} times lower" if ratio > 1 else f"{short(1 / ratio)} times higher"
            said = f"{c.name}: removing {REMOVED} layers by ρ leaves {less} perplexity than by Block Influence"
            found = f"{said}, {short(over[0])} and {short(over[1])} × dense (the paper: {RHO_OVER_BI:g} times lower)"
            wrecked = f"**Not decided:** {found}: both are wrecked."
            word = apart(rho, bi)
            also = "; by intervals alone, as no windows to pair were kept, not decided" if word == ALIKE else ""
            lines.append(wrecked if min(over) > WRECKED else stated(f"{found}{also}.", judged(word, "better")))
    return bullets(*lines)
