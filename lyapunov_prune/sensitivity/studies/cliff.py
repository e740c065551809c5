"""Study `cliff`: the most sensitive component of each layer, at five sparsities."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.studies.group import Group
from lyapunov_prune.sensitivity.study import Study, StudyRequest

CLIFF_SPARSITIES = (0.3, 0.5, 0.7, 0.9, 0.95)


class Cliff(Study):
    """The most sensitive component, layer by layer, at five sparsities, or at falling bits if the method rounds."""

    help = "the most sensitive component of each layer, at five sparsities or bits"
    reference = "structural sensitivity, §6.1, Figure 3"
    after_groups = True

    def changes(self, asked: StudyRequest) -> list[Change]:
        alone = Group().changes(asked)
        worst = max(alone, key=asked.badness).component
        return [
            Change(self.name, f"{group.label}, {level.amount}", group.matrices, level)
            for level in asked.base.levels(CLIFF_SPARSITIES)
            for group in alone
            if group.component == worst
        ]
