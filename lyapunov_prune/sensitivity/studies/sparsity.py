"""Study `sparsity`: all layers, at rising sparsities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Projections, Study

UNIFORM_SPARSITIES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Sparsity(Study):
    """All layers at rising sparsities."""

    name = "sparsity"
    help = "all layers, at rising sparsities"
    reference = "structural sensitivity, §5"
    takes = ("method",)

    def changes(self, ps: Projections, base: Compression, losses: Mapping[str, float]) -> list[Change]:
        return [Change(self.name, f"sparsity {s:g}", ps, Compression(base.method, s, None)) for s in UNIFORM_SPARSITIES]
