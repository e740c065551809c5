"""Study `backward`: layers k to the last, for each k."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Backward(Study):
    """Layers k to the last together, for each k."""

    help = "layers k to the last, for each k"
    reference = "structural sensitivity, §6.1, Figure 4"

    def changes(self, asked: StudyRequest) -> list[Change]:
        last = max(asked.layers)
        return [
            Change(self.name, f"layers {k} to {last}", tuple(p for p in asked.matrices if p.layer >= k), asked.base)
            for k in sorted(asked.layers, reverse=True)
        ]
