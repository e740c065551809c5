"""Study `greedy`: the k groups of least regret together, for each k."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.studies.group import Group
from lyapunov_prune.sensitivity.study import Projections, Study

ROUNDS = 36


class Greedy(Study):
    """Round k compresses the k groups of least regret (measured alone) together."""

    name = "greedy"
    help = "the k groups with the least regret together, for each k"
    reference = "structural sensitivity, §6.4, Figure 7"
    after_groups = True

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        from lyapunov_prune.sensitivity.sweep import badness

        order = sorted(Group().changes(ps, base, losses), key=lambda group: badness(losses[group.key]))
        return [
            Change(self.name, f"+ {order[k].label}", tuple(p for group in order[: k + 1] for p in group.matrices), base)
            for k in range(min(ROUNDS, len(order)))
        ]
