"""Study `backward`: layers k to the last, for each k."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study, by_layer


class Backward(Study):
    """Layers k to the last together, for each k."""

    name = "backward"
    help = "layers k to the last, for each k"
    reference = "structural sensitivity, §6.1, Figure 4"

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        last = max(by_layer(ps))
        return [
            Change(self.name, f"layers {k} to {last}", tuple(p for p in ps if p.layer >= k), base)
            for k in sorted(by_layer(ps), reverse=True)
        ]
