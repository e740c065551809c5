"""Study `group`: each component of each layer."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Group(Study):
    """A component of one layer, with all its heads or experts: the paper's compression groups."""

    help = "each component of each layer"
    reference = "structural sensitivity, §6.1, Figure 2"

    def changes(self, asked: StudyRequest) -> list[Change]:
        from lyapunov_prune.models.projections import groups

        named = {p.name: p for p in asked.matrices}
        return [
            Change(self.name, f"{layer} {component}", tuple(named[name] for name in names), asked.base)
            for (component, layer), names in groups(asked.matrices).items()
        ]
