"""Study `matrix`: each matrix."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study


class Matrix(Study):
    """Every matrix compressed alone."""

    name = "matrix"
    help = "each matrix"
    reference = "structural sensitivity, §6.1"

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        return [Change(self.name, p.name, (p,), base) for p in ps]
