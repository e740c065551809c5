"""Study `component`: each component in all layers."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study


class Component(Study):
    """A component in all layers together."""

    name = "component"
    help = "each component in all layers"
    reference = "structural sensitivity, §6.1"

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        names = dict.fromkeys(p.component for p in ps)
        return [Change(self.name, name, tuple(p for p in ps if p.component == name), base) for name in names]
