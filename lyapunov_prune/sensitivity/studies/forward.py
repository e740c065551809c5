"""Study `forward`: layers 0 to k, for each k."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Forward(Study):
    """Layers 0 to k together, for each k."""

    help = "layers 0 to k, for each k"
    reference = "structural sensitivity, §6.1, Figure 4"

    def changes(self, asked: StudyRequest) -> list[Change]:
        return [
            Change(self.name, f"layers 0 to {k}", tuple(p for p in asked.matrices if p.layer <= k), asked.base)
            for k in asked.layers
        ]
