"""Channels, or experts, in the order in which they leave every layer, and how many of them can."""

from __future__ import annotations

from typing import NamedTuple

from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.pruning.width import ChannelCosts, channel_costs, multiple_of
from lyapunov_prune.ranking.counts import Part
from lyapunov_prune.ranking.rank import rank
from lyapunov_prune.ranking.ranking import Ranking


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
