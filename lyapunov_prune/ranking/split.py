"""Split one budget between whole layers and parts of every other layer, by measured KL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lyapunov_prune.arguments import Count, Share
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import runs_model
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.progress import track
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import Operation
from lyapunov_prune.ranking.counts import SPLITS, Split, free_layers, most_not_over
from lyapunov_prune.ranking.rank import rank
from lyapunov_prune.ranking.table import CRITERIA
from lyapunov_prune.ranking.weighed import WeighedPlans, costs_of, leaving
from lyapunov_prune.ranking.within import Parts, parts_of

_STEPS = 4  # splits between no whole layer and layers alone
_LEAST_WINDOWS = 4


@runs_model
def split_removal(
    model: Plain,
    batch: Readable,
    remove: Share,
    what: Split,
    *,
    criterion: str = "best",
    protect: Sequence[int] = (),
    search: float | None = None,
    folder: str | Path | None = None,
    batch_size: Count = 1,
) -> WeighedPlans:
    """Find the cheapest way to remove a share of the parameters of the layers: whole layers, and parts of the others.

    `what` is `layers,width` or `layers,experts`. Up to five numbers of whole layers are tried, from none to as many as
    make up the share alone. `criterion` chooses the layers, with `protect` and `search` if it takes them. From the
    layers that stay, as many channels (`channel_costs`) or experts (`reap`) are removed as the share still needs. All
    of this sees every second window of `batch`; the KL of the predictions on the other windows decides, with nothing
    mended or refitted. No candidate leaves more parameters than the share allows. A search for layers keeps its checks
    in `folder` and does not repeat them.

    Layers alone and parts alone are among the candidates if they can make up the share, so the result costs no more
    than either on the windows that decide.

    Raises LyapunovPruneError for fewer than four windows, a share that no candidate can make up, and as `rank`,
    `channel_costs` and `find_mixtures`.
    """
    reading = read(model, batch)
    choosing, judging = apart(reading, every=2, most=None, least=_LEAST_WINDOWS)
    wanted = share_of(reading.structure, remove)
    parts = parts_of(choosing, SPLITS[what], batch_size=batch_size)
    ranked = None
    plans: list[PruningPlan] = []
    for count in track(numbers_of_layers(reading.structure, wanted, protect), "ways to share the budget"):
        layers = None
        if count:
            if ranked is None or CRITERIA[criterion].chooses:
                ranked = rank(
                    model,
                    choosing,
                    criterion=criterion,
                    remove=count,
                    protect=protect,
                    search=search,
                    jobs=folder,
                    batch_size=batch_size,
                )
            layers = ranked.plan(count)
        plan = _filled(reading, layers, parts, wanted)
        if plan is not None:
            plans.append(plan)
    if not plans:
        raise LyapunovPruneError(
            f"{remove:.0%} of the parameters of the layers cannot go, by layers or by {SPLITS[what]}; give less"
        )
    kl = costs_of(judging, list(map(Operation, plans)))
    return WeighedPlans(
        aim=f"remove {remove:.0%} of the parameters of the layers",
        plans=tuple(plans),
        kl=kl,
        left=tuple(model.model.num_parameters() - leaving(reading, plan) for plan in plans),
        chosen=int(np.argmin(np.nan_to_num(kl.mean(1), nan=np.inf))),
        measured_on=judging.measured_on(),
    )


def share_of(structure: Structure, remove: float) -> int:
    """The parameters that a share of those of the layers is, at least."""
    return math.ceil(remove * sum(p.numel() for p in structure.layers.parameters()))


def numbers_of_layers(structure: Structure, wanted: int, protect: Sequence[int] = ()) -> list[int]:
    """The numbers of whole layers to try, from none to those that hold `wanted` parameters, whichever they are."""
    sizes = np.cumsum(sorted(sum(p.numel() for p in layer.parameters()) for layer in structure.layers))
    most = min(int(np.searchsorted(sizes, wanted)) + 1, structure.num_layers - 1)
    most = min(most, len(free_layers(structure.num_layers, protect)))
    return sorted({round(most * n / _STEPS) for n in range(_STEPS + 1)})


def _filled(reading: Reading, layers: PruningPlan | None, parts: Parts, wanted: int) -> PruningPlan | None:
    """`layers`, filled up with `parts` of the others to `wanted` parameters; None if they cannot make up the rest."""
    gone = 0 if layers is None else leaving(reading, layers)
    if gone >= wanted:
        return layers

    def without(number: int) -> PruningPlan:
        further = parts.order.plan(parts.counts[number - 1])
        return further if layers is None else layers.followed_by(further)

    short = most_not_over(lambda number: leaving(reading, without(number)) >= wanted, len(parts.counts))
    return without(short + 1) if short < len(parts.counts) else None
