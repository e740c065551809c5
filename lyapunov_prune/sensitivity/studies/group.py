"""Study `group`: each component of each layer."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study


class Group(Study):
    """A component of one layer, with all its heads or experts: the paper's compression groups."""

    name = "group"
    help = "each component of each layer"
    reference = "structural sensitivity, §6.1, Figure 2"

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        from lyapunov_prune.models.projections import groups

        named = {p.name: p for p in ps}
        return [
            Change(self.name, f"{layer} {component}", tuple(named[name] for name in names), base)
            for (component, layer), names in groups(ps).items()
        ]
