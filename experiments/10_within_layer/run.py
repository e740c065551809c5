"""Within-layer reallocation and protection of layer 0, at the same budget (§6.4, Table 7).

    python experiments/10_within_layer/run.py [--model MODEL] [--text FILE]

Every layer keeps its sparsity, and attention is pruned more or less by a step, the MLP of the layer less or more; or
its matrices share it out by one of the schemes of `allocation.within`, over uniform and over ATP, by regrets under
Wanda that are measured on calibration text alone; or Wanda's columns are weighted by the errors that enter them. Beside
them the first MLP is left whole, the rest of the model paying for it. Writes within.json and within.svg.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, halves, texts
from experiments.compressions import Setting, compressions_figure, evaluate_compressions
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.fitting import fit
from lyapunov_prune.allocation.within import component_importance, constrained_threshold, sensitivity_guided
from lyapunov_prune.models.projections import find_projections
from lyapunov_prune.models.roles import role

HERE = Path(__file__).parent
STEPS = (-0.1, 0.1, 0.2)


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 4096,
) -> None:
    loaded = lp.load(model, device=device, dtype=dtype)
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
        Setting("wanda", lp.allocate(loaded.model, schedule, budget), column_weights=True, label="Lyapunov columns")
        for budget in (0.5, 0.7)
        for schedule in ("uniform", "atp")
    ]
    table = evaluate_compressions(loaded.model, settings, calibration, evaluation)
    table.save(HERE / "within.json")
    draw(HERE, {"within": compressions_figure(table)})
    print(table)


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
    yield replace(even, schedule="first MLP whole", amount=kept)


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


if __name__ == "__main__":
    typer.run(main)
