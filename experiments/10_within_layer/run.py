"""Within-layer reallocation and protection of layer 0, at the same budget (§6.4, Table 7).

    python experiments/10_within_layer/run.py [--model MODEL] [--text FILE]

Every layer keeps its sparsity, and attention is pruned more or less by a step, the MLP of the layer less or more; or
its matrices share it out by one of the schemes of `allocation.within`, over uniform and over ATP, by regrets under
Wanda that are measured on calibration text alone; or Wanda's columns are weighted by the errors that enter them. Beside
them the first MLP is left whole, the rest of the model paying for it. Writes within.json, row by row (a row that stands
there is not measured again), and within.svg; what they say goes into README.md by `make tables`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, halves, load, of_model, texts
from experiments.compressions import (
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
from experiments.statements import bullets, interval, percent, stated, table
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.fitting import fit
from lyapunov_prune.allocation.within import component_importance, constrained_threshold, sensitivity_guided
from lyapunov_prune.models.projections import find_projections
from lyapunov_prune.models.roles import role

HERE = Path(__file__).parent
STEPS = (-0.1, 0.1, 0.2)
COLUMNS = "Lyapunov columns"
SCHEMES = ("sensitivity-guided", "component-importance", "constrained-threshold", COLUMNS)
WHOLE = "first MLP whole"
PAPER = {0.5: "6.94 and 7.20 after 6.88", 0.7: "29.1 and 63.0 after 22.3"}


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
    first, second = halves(calibration)
    regrets = lp.measure_sensitivity(
        loaded.model, second, studies=("group", "component"), method="wanda", sparsity=0.5, calibration=first
    )
    settings = [
        Setting(method, allocation)
        for method, budgets in (("wanda", (0.5, 0.7)), ("magnitude", (0.5,)))
        for budget in budgets
        for allocation in (*allocations(loaded, budget), *schemes(loaded.model, budget, regrets, calibration))
    ]
    settings += [
        Setting("wanda", lp.allocate(loaded.model, schedule, budget), column_weights=True, label=COLUMNS)
        for budget in (0.5, 0.7)
        for schedule in ("uniform", "atp")
    ]
    found = evaluate_compressions(loaded.model, settings, calibration, evaluation, path=folder / "within.json")
    draw(folder, {"within": compressions_figure(found)})
    print(found)


def allocations(loaded: lp.models.Loaded, budget: float) -> Iterator[Allocation]:
    even = lp.allocate(loaded.model, "uniform", budget)
    projections = find_projections(loaded.model)
    sizes, layers = np.array(even.sizes), np.array(even.layers)
    in_mlp = np.array([role(p.component) in ("mlp-in", "mlp-out") for p in projections])
    yield even
    for step in STEPS:
        amount = even.amount.copy()
        for layer in np.unique(layers):
            here = layers == layer
            share = sizes[here & ~in_mlp].sum() / sizes[here & in_mlp].sum()
            amount[here & ~in_mlp] += step
            amount[here & in_mlp] -= step * share
        yield replace(even, schedule=f"attention {step:+g}", amount=amount)
    first = np.array([p.layer == 0 and role(p.component) == "mlp-in" for p in projections])
    kept = fit(np.ones(len(sizes)), sizes, budget, high=np.where(first, 0.0, 0.99))
    yield replace(even, schedule=WHOLE, amount=kept)


def schemes(
    model: PreTrainedModel, budget: float, regrets: lp.sensitivity.Sensitivity, calibration: lp.TokenBatch
) -> Iterator[Allocation]:
    for schedule in ("uniform", "atp"):
        base = lp.allocate(model, schedule, budget)
        if schedule != "uniform":
            yield base
        yield sensitivity_guided(model, base, regrets)
        yield component_importance(model, base, regrets)
        yield constrained_threshold(model, base, calibration)


Rows = dict[tuple[str, float], dict[str, CompressionRow]]


def written(folder: Path = HERE) -> dict[str, str]:
    found = CompressionTable.load(folder / "within.json")
    rows = by_setting(found)
    return {"setting": setting(found), "within": within_table(rows), "verdict": verdict(found)}


def by_setting(found: CompressionTable) -> Rows:
    """The rows of each method and budget by the name of their allocation; columns stand beside the rest of Wanda."""
    rows: Rows = {}
    for row in found.rows:
        columns = row.method == COLUMNS
        name = f"{row.allocation}, {COLUMNS}" if columns else row.allocation
        rows.setdefault(("wanda" if columns else row.method, row.amount), {})[name] = row
    return rows


def within_table(rows: Rows) -> str:
    """Perplexity over that of the dense model, and over that of the allocation which was changed."""
    head = ["", *(word for method, b in rows for word in (f"{method}, {percent(b)}: / dense", "/ unchanged"))]
    names = sorted({name: None for of in rows.values() for name in of}, key=lambda name: _base(name) == "atp")
    lines: list[list[object]] = []
    for name in names:
        pairs = ((of.get(name), of[_base(name)]) for of in rows.values())
        cells = ((r and r.degradation, None if r in (None, base) else beside(r, base)) for r, base in pairs)
        lines.append([name, *(cell for pair in cells for cell in pair)])
    return table(head, lines)


def _base(name: str) -> str:
    """The allocation that a row has changed."""
    return "atp" if name.split(", ")[0] == "atp" else "uniform"


def verdict(found: CompressionTable) -> str:
    """Each claim of §6.4 and §7, by Wanda, against the allocation that is changed; then what magnitude says."""
    lines = [f"One model, {found.measured_on.model.name}; the intervals are of {len(found.rows[0].windows)} windows."]
    for (method, budget), of in by_setting(found).items():
        even, atp, how = of["uniform"], of["atp"], f"{method}, {percent(budget)}"
        wanda = method == "wanda"
        shifts = {name: told(row, even) for name, row in of.items() if name.startswith("attention")}
        paper = f" (the paper, over ATP: {PAPER[budget]})" if wanda else ""
        lines.append(
            stated(f"{how}, shifts over uniform: {grouped(shifts)}{paper}.", _all_worse(shifts) if wanda else "")
        )
        for base in ("atp", "uniform"):
            said = {s: told(of[f"{base}, {s}"], of[base]) for s in SCHEMES if f"{base}, {s}" in of}
            line = f"{how}, schemes over {base}: {grouped(said)}"
            if wanda and base == "atp":
                agrees = "Differs" if "better" in said.values() else "Agrees"
                lines.append(stated(f"{line} (the paper: none improves over ATP).", agrees))
            else:
                lines.append(stated(f"{line}."))
        kept = of[WHOLE]
        line = (
            f"{how}, {WHOLE}: {told(kept, even)}, {interval(*against(kept, even))} of uniform; {told(kept, atp)}, "
            f"{interval(*against(kept, atp))} of ATP"
        )
        if (method, budget) == ("wanda", 0.5):
            paper = " (the paper, of uniform on GPT-2 Small: 32.3 to 34.6)"
            lines.append(stated(f"{line}{paper}.", judged(told(kept, even), "better")))
        else:
            lines.append(stated(f"{line}."))
    return bullets(*lines)


def _all_worse(said: dict[str, str]) -> str:
    words = {*said.values()}
    return "Agrees" if words == {"worse"} else "Differs" if "better" in words else "Not decided"


if __name__ == "__main__":
    typer.run(main)
