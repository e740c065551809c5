"""Hidden channels, or experts, in the order in which they leave every layer, and as many as a divergence allows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lyapunov_prune.arguments import Count, Positive
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import Operation
from lyapunov_prune.pruning.width import ChannelCosts, channel_costs, multiple_of
from lyapunov_prune.ranking.counts import Part, most_not_over, nothing_within
from lyapunov_prune.ranking.rank import rank
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.ranking.weighed import WeighedPlans, costs_of, leaving


class Parts(NamedTuple):
    """An `order` whose `plan(n)` removes n parts from every layer that has some, for every n in `counts`."""

    order: ChannelCosts | Ranking
    counts: range


def parts_of(reading: Reading, what: Part, *, criterion: str | None = None, batch_size: int = 1) -> Parts:
    """Order the hidden channels (`width`), or the `experts` by `criterion`, on the windows of `reading`.

    Raises LyapunovPruneError as `channel_costs`, `rank` and `models.mixtures.find_mixtures`.
    """
    if what == "width":
        costs = channel_costs(reading, batch_size=batch_size)
        step = multiple_of(costs.width)
        return Parts(costs, range(costs.width % step or step, costs.width, step))
    order = rank(reading.decoder, reading, criterion=criterion, what=what, batch_size=batch_size)
    router = reading.decoder.mixtures.router
    return Parts(order, range(router.groups, router.most + 1, router.groups))


@runs_model
def most_within(
    model: InMemory,
    batch: Readable,
    what: Part,
    max_kl: Positive,
    *,
    criterion: str | None = None,
    batch_size: Count = 1,
) -> WeighedPlans:
    """Find the largest removal of `what` (`width` or `experts`) with `KL(p‖q)` of at most `max_kl`.

    Every second window of `batch` orders the channels, or the experts by `criterion`. The KL is measured on the other
    windows. The search (`counts.most_not_over`) assumes that the KL rises with the number removed;
    if it does not, a larger removal may be within `max_kl` too.

    Raises LyapunovPruneError if even the smallest removal costs more, for another `what`, for a batch of one window,
    and as `channel_costs` and `rank`.
    """
    reading = read(model, batch)
    choosing, judging = apart(reading, every=2, most=None)
    order, counts = parts_of(choosing, what, criterion=criterion, batch_size=batch_size)
    if what == "experts":
        router = reading.decoder.mixtures.router
        router.require_removed(router.groups)
    tried: dict[int, tuple[PruningPlan, np.ndarray]] = {}

    def is_over(number: int) -> bool:
        plan = order.plan(counts[number - 1])
        (kl,) = costs_of(judging, [Operation(plan)])
        tried[number] = plan, kl
        return not kl.mean() <= max_kl  # NaN counts as over

    number = most_not_over(is_over, len(counts))
    if number == 0:
        aim, first = f"a KL of {max_kl:g} nats a token", f"the first step, {counts[0]} of every layer,"
        raise nothing_within(what, aim, first, tried[1][1].mean())
    rows = sorted(tried)
    plans = tuple(tried[n][0] for n in rows)
    return WeighedPlans(
        aim=f"stay within {max_kl:g} nats a token",
        plans=plans,
        kl=np.array([tried[n][1] for n in rows]),
        left=tuple(reading.model.num_parameters() - leaving(reading, plan) for plan in plans),
        chosen=rows.index(number),
        measured_on=judging.measured_on(),
    )
