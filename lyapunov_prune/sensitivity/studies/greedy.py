"""Study `greedy`: the k groups of least regret together, for each k."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.studies.group import Group
from lyapunov_prune.sensitivity.study import Study, StudyRequest

ROUNDS = 36


class Greedy(Study):
    """Round k compresses the k groups of least regret (measured alone) together."""

    help = "the k groups with the least regret together, for each k"
    reference = "structural sensitivity, §6.4, Figure 7"
    after_groups = True

    def changes(self, asked: StudyRequest) -> list[Change]:
        order = sorted(Group().changes(asked), key=asked.badness)
        return [
            Change(self.name, f"+ {order[k].label}", tuple(p for g in order[: k + 1] for p in g.matrices), asked.base)
            for k in range(min(ROUNDS, len(order)))
        ]
