"""Study `greedy-rescored`: like `greedy`, but the remaining groups are scored again after each round."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.studies.greedy import ROUNDS
from lyapunov_prune.sensitivity.studies.group import Group
from lyapunov_prune.sensitivity.study import Matrices, Study, StudyRequest


class GreedyRescored(Study):
    """Each round adds the group with the least loss when compressed together with those of the earlier rounds.

    The changes are the rounds that `losses` decides, and those to measure for the next round: about `rounds × groups`
    in all.
    """

    help = "greedy with groups scored again after each step (slow; not in all)"
    reference = "structural sensitivity, §6.4, Figure 7"
    after_groups = True
    in_all = False

    def changes(self, asked: StudyRequest) -> list[Change]:
        left, rounds = Group().changes(asked), list[Change]()
        taken: Matrices = ()
        while left and len(rounds) < ROUNDS:
            tried = [Change(self.name, f"+ {g.label}", (*taken, *g.matrices), asked.base) for g in left]
            if not all(change.key in asked.losses for change in tried):
                return rounds + tried
            best = min(range(len(left)), key=lambda i: asked.badness(tried[i]))
            taken = tried[best].matrices
            rounds.append(tried[best])
            del left[best]
        return rounds
