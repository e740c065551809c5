"""Study `layer`: each layer."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study, by_layer


class Layer(Study):
    """Every layer compressed alone."""

    name = "layer"
    help = "each layer"
    reference = "structural sensitivity, §6.1"

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        return [Change(self.name, f"layer {k}", group, base) for k, group in by_layer(ps).items()]
