"""Study `removal`: each layer removed."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study, by_layer


class Removal(Study):
    """Every layer removed alone."""

    name = "removal"
    help = "each layer removed"
    reference = "structural sensitivity, §6.5"
    takes = ()

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        return [Change(self.name, f"layer {k}", remove=(k,)) for k in by_layer(ps)]
