"""Layers and parts of the others under one budget: every way to share it, held against each alone.

    python experiments/2_criteria/width_and_depth/run.py [--model MODEL] [--text FILE] [--criterion NAME] [--what WHAT]

`split_removal` chooses on one half of a text, and the last matrices are refitted if that pays, as `prune` does; KL from
the dense model and the loss of all ways are measured on the other half. Writes MODEL-TEXT.json beside this file,
one a text; what they say goes into README.md of chapters 2 and 8 by `make tables`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from experiments.common import Each, Inputs, Model, measure_each, run_command
from experiments.statements import bullets, ratio, short, table
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.mending.judge import losses, second_text
from lyapunov_prune.models.structure import Structure, in_eval_mode
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.pruning.counting import held_by, shares_leaving
from lyapunov_prune.pruning.edit import edit_of
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import refits_of
from lyapunov_prune.pruning.removed import ChannelsGone, ExpertsGone
from lyapunov_prune.pruning.surgery import Operation, cut
from lyapunov_prune.pruning.width import channel_costs, multiple_of
from lyapunov_prune.ranking.counts import most_not_over
from lyapunov_prune.ranking.rank import rank
from lyapunov_prune.ranking.table import CRITERIA
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

HERE = Path(__file__).parent
STEPS = 4  # splits between no whole layer and layers alone
LEAST_WINDOWS = 4
Split = Literal["layers,width", "layers,experts"]


@dataclass(frozen=True)
class WeighedPlans(Result):
    """`plans` for one model, what each leaves and costs, and which of them is `chosen` for the `aim`.

    `kl[n, w]` is KL(p‖q) in nats, the mean over every position but the last of window w, where `p` is the prediction of
    the dense model and `q` that of the model without plan n's parts. These windows did not choose the parts.
    Nothing is mended or refitted. `left[n]` is the number of parameters that stay.
    """

    aim: str
    plans: tuple[PruningPlan, ...]
    kl: np.ndarray
    left: tuple[int, ...]
    chosen: int
    measured_on: MeasuredOn

    def plan(self) -> PruningPlan:
        """The chosen plan; its history includes the text that chose among the plans."""
        return self.plans[self.chosen].seen_on(self.measured_on)

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"plan": [p.sentence() for p in self.plans], "left": self.left, "kl": self.kl.mean(1)})

    def headline(self) -> str:
        return f"{len(self.plans)} ways to {self.aim}\n{self.measured_on.line()}"


def split_removal(reading: Reading, remove: float, what: Split, criterion: str) -> WeighedPlans:
    """The cheapest way to remove a share of the parameters of the layers: whole layers, and parts of the others.

    Up to five numbers of whole layers are tried, from none to as many as make up the share alone. `criterion` chooses
    them. From the layers that stay, as many channels (`channel_costs`) or experts (`reap`) are removed as the share
    still needs. All of this sees every second window; the KL of the predictions on the others decides.
    """
    choosing, judging = apart(reading, of=2, most=None, least=LEAST_WINDOWS // 2)
    structure = reading.structure
    wanted = math.ceil(remove * sum(p.numel() for p in structure.layers.parameters()))
    order, counts = parts_of(choosing, what)
    plans: list[PruningPlan] = []
    ranked = None
    for count in numbers_of_layers(structure, wanted):
        if count and (ranked is None or CRITERIA[criterion].chooses):
            ranked = rank(reading.decoder, choosing, criterion=criterion, remove=count)
        layers = None if not count or ranked is None else ranked.plan(count)
        plan = filled(reading, layers, order, counts, wanted)
        if plan is not None:
            plans.append(plan)
    kl = costs_of(judging, list(map(Operation, plans)))
    return WeighedPlans(
        aim=f"remove {remove:.0%} of the parameters of the layers",
        plans=tuple(plans),
        kl=kl,
        left=tuple(reading.model.num_parameters() - leaving(reading, plan) for plan in plans),
        chosen=int(np.argmin(np.nan_to_num(kl.mean(1), nan=np.inf))),
        measured_on=judging.measured_on(),
    )


def parts_of(reading: Reading, what: Split) -> tuple[Callable[[int], PruningPlan], range]:
    """What makes a plan of as many channels or experts of every layer, and the numbers that can leave."""
    if what == "layers,width":
        costs = channel_costs(reading)
        step = multiple_of(costs.width)
        return costs.plan, range(costs.width % step or step, costs.width, step)
    router = reading.decoder.mixtures.router
    order = rank(reading.decoder, reading, what="experts")
    return order.plan, range(router.groups, router.most + 1, router.groups)


def numbers_of_layers(structure: Structure, wanted: int) -> list[int]:
    """The numbers of whole layers to try, from none to those that hold `wanted` parameters, whichever they are."""
    sizes = np.cumsum(sorted(sum(p.numel() for p in layer.parameters()) for layer in structure.layers))
    most = min(int(np.searchsorted(sizes, wanted)) + 1, structure.num_layers - 1)
    return sorted({round(most * n / STEPS) for n in range(STEPS + 1)})


def filled(
    reading: Reading,
    layers: PruningPlan | None,
    order: Callable[[int], PruningPlan],
    counts: range,
    wanted: int,
) -> PruningPlan | None:
    """`layers`, filled up with parts of the others to `wanted` parameters; None if they cannot make up the rest."""
    if layers is not None and leaving(reading, layers) >= wanted:
        return layers

    def without(number: int) -> PruningPlan:
        further = order(counts[number - 1])
        if layers is None:
            return further
        assert isinstance(further.gone, ChannelsGone | ExpertsGone)
        both = replace(
            layers,
            gone=further.gone.beside(layers.remove),
            criterion=f"{layers.criterion}, then {further.criterion}",
        )
        return both.seen_on(*further.measured_on)

    short = most_not_over(lambda number: leaving(reading, without(number)) >= wanted, len(counts))
    return without(short + 1) if short < len(counts) else None


@in_eval_mode
def costs_of(reading: Reading, operations: Sequence[Operation]) -> np.ndarray:
    """KL(p‖q) in nats between the dense model and each changed one, (operations × windows)."""
    changes = [(min(each.plan.touched), partial(each.standing_in, reading.decoder)) for each in operations]
    windows = []
    for window in range(len(reading.batch)):
        one = replace(reading, batch=reading.batch.take([window]))
        windows.append(divergences_of(one, changes, 1.0, 1, f"window {window + 1} of {len(reading.batch)}")[:, 1])
    return np.array(windows).T


def leaving(reading: Reading, plan: PruningPlan) -> int:
    """How many parameters `plan` removes."""
    return held_by(reading.model, (), shares_leaving(reading.decoder, edit_of(reading.decoder, plan)))[0]


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
    weighed = split_removal(calibration, remove, what, criterion)
    print(weighed, flush=True)
    made = [Operation(plan) for plan in weighed.plans]
    chosen = weighed.plans[weighed.chosen]
    if isinstance(chosen.gone, ChannelsGone):
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
    for parts, before in ((ChannelsGone, ""), (ExpertsGone, "experts ")):
        of = [r for r in results.values() if any(isinstance(plan.gone, parts) for plan in r.weighed.plans)]
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
    gone = plan.gone
    if isinstance(gone, ChannelsGone):
        return f"{gone.fewer} of {gone.width:,} channels"
    return f"{gone.fewer} expert{'s' * (gone.fewer > 1)}" if isinstance(gone, ExpertsGone) else "none"


if __name__ == "__main__":
    run_command(main, HERE / "{model}-{text}.json", written)
