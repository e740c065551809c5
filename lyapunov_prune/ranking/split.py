"""Split one budget between whole layers and parts of every other layer, by measured KL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from lyapunov_prune.arguments import Share
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.mending.judge import second_text
from lyapunov_prune.mending.refit import judged_refits
from lyapunov_prune.models.decoder import takes_model
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import Structure, in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.pruning.operation import Operation
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import cut
from lyapunov_prune.pruning.width import channel_costs, multiple_of
from lyapunov_prune.ranking.counts import SPLITS, free_layers
from lyapunov_prune.ranking.rank import rank
from lyapunov_prune.ranking.table import CRITERIA
from lyapunov_prune.ranking.weighed import WeighedPlans, costs_of, leaving

_STEPS = 4  # splits between no whole layer and layers alone
_LEAST_WINDOWS = 4


@takes_model
@in_eval_mode
@torch.no_grad()
def split_removal(
    model: Plain,
    batch: Readable,
    remove: Share,
    what: str,
    *,
    criterion: str = "best",
    protect: Sequence[int] = (),
    search: float | None = None,
    judge: TokenBatch | None = None,
    batch_size: int = 1,
) -> WeighedPlans:
    """Find the cheapest way to remove a share of the parameters of the layers: whole layers, and parts of the others.

    `what` is `layers,width` or `layers,experts`. Up to five numbers of whole layers are tried, from none to as many as
    make up the share alone. `criterion` chooses the layers, with `protect` and `search` if it takes them. From the
    model without them, as many channels (`channel_costs`) or experts of each layer (`reap`) are removed as the share
    still needs. All of this sees every second window of `batch`; the KL of the predictions on the other windows
    decides. If channels are removed, the last matrices are refitted if that pays on `judge` too
    (`mending.refit.judged_refits`). No candidate leaves more parameters than the share allows.

    Layers alone and parts alone are among the candidates if they can make up the share, so the result costs no more
    than either on the windows that decide.

    Raises LyapunovPruneError for fewer than four windows, a share that no candidate can make up, and as `rank`,
    `channel_costs` and `find_mixtures`.
    """
    if what not in SPLITS:
        raise LyapunovPruneError(f"unknown --what {what!r} to share a budget; give one of {', '.join(SPLITS)}")
    reading = read(model, batch)
    if len(reading.batch) < _LEAST_WINDOWS:
        raise LyapunovPruneError(
            f"one half of the windows chooses what goes and the other compares, and there are {len(reading.batch)}; "
            f"give {_LEAST_WINDOWS} or more (--tokens, --context)"
        )
    choosing, judging = apart(reading, every=2, most=None)
    wanted = math.ceil(remove * sum(p.numel() for p in reading.structure.layers.parameters()))
    most = min(_fewest_layers(reading.structure, wanted), len(free_layers(len(reading.decoder.layers), protect)))
    if SPLITS[what] == "width" and judge is None:
        judge = second_text(reading)
    ranked = None
    found: list[Operation] = []
    for count in track(sorted({round(most * n / _STEPS) for n in range(_STEPS + 1)}), "ways to share the budget"):
        plan = None
        if count:
            if ranked is None or CRITERIA[criterion].chooses:
                ranked = rank(
                    model,
                    choosing,
                    criterion=criterion,
                    remove=count,
                    protect=protect,
                    search=search,
                    batch_size=batch_size,
                )
            plan = ranked.plan(count)
        operation = _filled(reading, choosing, plan, wanted, SPLITS[what], judge, batch_size)
        if operation is not None:
            found.append(operation)
    if not found:
        raise LyapunovPruneError(
            f"{remove:.0%} of the parameters of the layers cannot go, by layers or by {SPLITS[what]}; give less"
        )
    kl = costs_of(judging, found)
    return WeighedPlans(
        aim=f"remove {remove:.0%} of the parameters of the layers",
        plans=tuple(operation.plan for operation in found),
        kl=kl,
        refitted=tuple(bool(operation.refits) for operation in found),
        left=tuple(model.model.num_parameters() - leaving(reading, operation.plan) for operation in found),
        chosen=int(np.argmin(np.nan_to_num(kl.mean(1), nan=np.inf))),
        measured_on=judging.measured_on(),
    )


def _fewest_layers(structure: Structure, parameters: int) -> int:
    """How many layers hold at least `parameters`, whichever they are; all layers but one if even those hold fewer."""
    sizes = np.cumsum(sorted(sum(p.numel() for p in layer.parameters()) for layer in structure.layers))
    return min(int(np.searchsorted(sizes, parameters)) + 1, structure.num_layers - 1)


def _filled(
    reading: Reading,
    choosing: Reading,
    plan: PruningPlan | None,
    wanted: int,
    part: str,
    judge: TokenBatch | None,
    batch_size: int,
) -> Operation | None:
    """`plan`, filled up with removals of `part` to `wanted` parameters; None if `part` cannot make up the rest."""
    missing = wanted - (0 if plan is None else leaving(reading, plan))
    if missing <= 0:
        assert plan is not None
        return Operation(plan)
    shallow = reading.decoder if plan is None else cut(reading.decoder, Operation(plan), shared=True)
    whole, taught = Reading(shallow, reading.batch), Reading(shallow, choosing.batch)
    further = _channels(taught, missing, batch_size) if part == "width" else _experts(taught, missing, batch_size)
    if further is None:
        return None
    refits: tuple[torch.Tensor, ...] = ()
    if part == "width":
        refits, _ = judged_refits(shallow, torch.from_numpy(further.kept_channels), whole.batch, judge)
    return Operation(further if plan is None else plan.followed_by(further), refits=refits)


def _channels(reading: Reading, parameters: int, batch_size: int) -> PruningPlan | None:
    costs = channel_costs(reading, batch_size=batch_size)
    multiple = multiple_of(costs.width)
    least = costs.plan(multiple)
    one = leaving(reading, least) / least.channels_gone
    stay = (costs.width - math.ceil(parameters / one)) // multiple * multiple
    return costs.plan(costs.width - stay) if stay > 0 else None


def _experts(reading: Reading, parameters: int, batch_size: int) -> PruningPlan | None:
    ranking = rank(reading.decoder, reading, what="experts", batch_size=batch_size)
    router = find_mixtures(reading.structure).router
    if router.most < 1:
        return None
    one = leaving(reading, ranking.plan(router.groups)) / router.groups
    count = math.ceil(parameters / one / router.groups) * router.groups
    return ranking.plan(count) if count <= router.most else None
