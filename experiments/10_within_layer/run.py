"""Within-layer reallocation and protection of layer 0, at the same budget (§6.4, Table 7).

    python experiments/10_within_layer/run.py [--model MODEL] [--text FILE]

Attention is pruned more or less by a step, the MLP of the same layer less or more, so that every layer keeps its
sparsity; and the first MLP is left whole, the rest of the model paying for it. Writes within.json and within.svg.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, texts
from experiments.compressions import Setting, compressions_figure, evaluate_compressions
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.fitting import fit
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
    settings = [
        Setting(method, allocation)
        for method, budgets in (("wanda", (0.5, 0.7)), ("magnitude", (0.5,)))
        for budget in budgets
        for allocation in allocations(loaded, budget)
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


if __name__ == "__main__":
    typer.run(main)
