"""Where to spend the sparsity: every schedule with Wanda at 50 % and 70 % (§6.4, Table 7), and the bits (§6.2).

    python experiments/09_allocation/run.py [--model MODEL] [--text FILE]

The guidelines are there twice: with their default ceiling, and with the catastrophe threshold s* as measured on the
calibration text, Wanda by its first half and regret on the second. Bits by ρ stand beside as many bits shared out
evenly, and beside the same layers the other way round. Writes allocation.json, bits.json and their figures beside this
file.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import typer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.common import Device, DType, draw, halves, texts
from experiments.compressions import Setting, compressions_figure, evaluate_compressions
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.lyapunov import Reading
from lyapunov_prune.profiles.contraction import ContractionProfile, Pooling

HERE = Path(__file__).parent
SCHEDULES = ("uniform", "atp", "atp-search", "owl", "alpha-pruning", "guidelines")
WIDTHS = ((3, 4), (4, 8))


def main(
    model: str = "smollm2-135m",
    device: Device = "auto",
    dtype: DType = None,
    text: str = "builtin",
    tokens: int = 4096,
) -> None:
    loaded = lp.load(model, device=device, dtype=dtype)
    calibration, evaluation = texts(loaded, text, calibration=tokens // 2, evaluation=tokens, context=512)
    profile = lp.measure_contraction(loaded.model, calibration, seeds=range(2))
    ceiling = threshold(loaded.model, calibration)
    print(ceiling.headline())
    settings = [setting for s in (0.5, 0.7) for setting in sparsities(loaded.model, s, profile, ceiling)]
    table = evaluate_compressions(loaded.model, settings, calibration, evaluation)
    table.save(HERE / "allocation.json")
    widths = evaluate_compressions(loaded.model, list(bits(loaded.model, profile)), calibration, evaluation)
    widths.save(HERE / "bits.json")
    draw(HERE, {"allocation": compressions_figure(table), "bits": compressions_figure(widths)})
    print(table, widths, sep="\n\n")


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
        yield Setting("wanda", _named(chosen, "guidelines", "s*"))


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


if __name__ == "__main__":
    typer.run(main)
