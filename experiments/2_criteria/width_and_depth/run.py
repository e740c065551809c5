"""Layers and parts of the others under one budget: every way of `prune --what layers,width`, held against each alone.

    python experiments/2_criteria/width_and_depth/run.py [--model MODEL] [--text FILE] [--criterion NAME] [--what WHAT]

`split_removal` chooses on one half of a text, and the last matrices are refitted if that pays, as the command does; KL
from the dense model and the loss of all ways are measured on the other half. Writes MODEL-TEXT.json beside this file,
one a text; what they say goes into README.md of chapters 2 and 8 by `make tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.common import Each, Inputs, Model, measure_each, run_command
from experiments.statements import bullets, ratio, short, table
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.mending.judge import losses, second_text
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import refits_of
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.ranking.counts import Split
from lyapunov_prune.ranking.split import split_removal
from lyapunov_prune.ranking.weighed import WeighedPlans, costs_of
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent


@dataclass(frozen=True)
class WidthAndDepth(Result):
    """The ways of `weighed` on windows that chose nothing: KL and loss (ways × windows), and the dense loss.

    If refitting the chosen way pays, a further row holds the chosen way refitted.
    """

    weighed: WeighedPlans
    kl: np.ndarray
    windows: np.ndarray
    dense: np.ndarray
    measured_on: MeasuredOn

    @property
    def refitted(self) -> bool:
        return len(self.kl) > len(self.weighed.plans)

    def headline(self) -> str:
        chose, compared = self.weighed.plan().measured_on[0], self.weighed.measured_on
        return f"{self.measured_on.line()}; chosen on {chose.line()}; compared on {compared.line()}"


def main(
    model: Model = Model(),
    text: Each = None,
    tokens: int = 4096,
    context: int = 512,
    remove: float = 0.2,
    criterion: str = "best",
    what: Split = "layers,width",
) -> None:
    asked = partial(measure, remove=remove, criterion=criterion, what=what)
    measure_each(asked, HERE, model, text, tokens, context)


@torch.no_grad()
def measure(given: Inputs, remove: float, criterion: str, what: Split) -> WidthAndDepth:
    decoder, held_out = given.loaded, read(given.loaded, given.evaluation)
    calibration = read(decoder, given.calibration)
    weighed = split_removal(decoder, calibration, remove, what, criterion=criterion)
    print(weighed, flush=True)
    made = [Operation(plan) for plan in weighed.plans]
    chosen = weighed.plans[weighed.chosen]
    if chosen.channels:
        refits, _ = refits_of(decoder, chosen, calibration.batch, second_text(calibration))
        made += [Operation(chosen, refits=refits)] if refits else []
    shorter = [Reading(cut(decoder, each, shared=True), held_out.batch) for each in made]
    return WidthAndDepth(
        weighed=weighed,
        kl=costs_of(held_out, made),
        windows=np.array([losses(each, ()) for each in shorter]),
        dense=losses(held_out, ()),
        measured_on=held_out.measured_on(),
    )


def written() -> dict[str, str]:
    results = {path.stem: WidthAndDepth.load(path) for path in sorted(HERE.glob("*.json"))}
    head = (
        "model, text",
        "layers that go",
        "parts of the others",
        "parameters left",
        "KL that chose",
        "KL held out",
        "perplexity",
        "over the dense",
    )
    found = {f"{name} beside layers": beside_layers(r) for name, r in results.items()}
    for parts, before in (("channels", ""), ("experts", "experts ")):
        of = [r for r in results.values() if any(getattr(plan, parts) for plan in r.weighed.plans)]
        found[f"{before}setting"] = bullets(*(f"{r.headline()}; dense perplexity {ratio(r.dense)}" for r in of))
        found[f"{before}table"] = table(head, [row for r in of for row in _rows(r)])
    return found


def beside_layers(result: WidthAndDepth) -> str:
    """The held-out KL of what is written of the chosen way over that of layers alone, paired by window."""
    alone = next(n for n, plan in enumerate(result.weighed.plans) if not plan.drops_parts)
    written = -1 if result.refitted else result.weighed.chosen
    return ratio(np.log(result.kl[written]) - np.log(result.kl[alone]))


def _rows(result: WidthAndDepth) -> Iterator[tuple[object, ...]]:
    weighed = result.weighed
    name = f"{result.measured_on.model.name}, {Path(result.measured_on.text).stem}"
    for n, windows in enumerate(result.windows):
        again = n == len(weighed.plans)
        way = weighed.chosen if again else n
        plan = weighed.plans[way]
        chosen = "**" if way == weighed.chosen else ""
        yield (
            name,
            f"{chosen}{len(plan.remove)} of {plan.model.num_layers}{chosen}",
            _parts(plan) + (", refitted" if again else ""),
            f"{weighed.left[way]:,}",
            None if again else short(float(weighed.kl[way].mean())),
            short(float(result.kl[n].mean())),
            short(float(np.exp(windows.mean()))),
            ratio(windows - result.dense),
        )


def _parts(plan: PruningPlan) -> str:
    if plan.channels:
        return f"{plan.channels_gone} of {plan.width:,} channels"
    count = max(map(len, plan.experts), default=0)
    return f"{count} expert{'s' * (count > 1)}" if count else "none"


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
