"""Study `layer0`: layer 0, at rising sparsities."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest

FIRST_LAYER_SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)


class FirstLayer(Study):
    """Layer 0 alone at rising sparsities, or at falling bits if the method rounds."""

    help = "layer 0, at rising sparsities or falling bits"
    reference = "structural sensitivity, §5"
    takes = ("method", "rank")

    def changes(self, asked: StudyRequest) -> list[Change]:
        first = asked.layers[min(asked.layers)]
        return [Change(self.name, level.amount, first, level) for level in asked.base.levels(FIRST_LAYER_SPARSITIES)]
