"""Study `forward`: layers 0 to k, for each k."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study, by_layer


class Forward(Study):
    """Layers 0 to k together, for each k."""

    name = "forward"
    help = "layers 0 to k, for each k"
    reference = "structural sensitivity, §6.1, Figure 4"

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        return [Change(self.name, f"layers 0 to {k}", tuple(p for p in ps if p.layer <= k), base) for k in by_layer(ps)]
