"""Study `layer`: each layer."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Layer(Study):
    """Every layer compressed alone."""

    help = "each layer"
    reference = "structural sensitivity, §6.1"

    def changes(self, asked: StudyRequest) -> list[Change]:
        return [Change(self.name, f"layer {k}", group, asked.base) for k, group in asked.layers.items()]
