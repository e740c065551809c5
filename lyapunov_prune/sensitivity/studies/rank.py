"""Study `rank`: all layers, at rising ranks."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Study, StudyRequest

UNIFORM_RANKS = (8, 16, 32, 64, 128, 256)


class Rank(Study):
    """All layers at rising ranks; by `svd` if the method rounds, because rounding has no rank."""

    help = "all layers, at rising ranks"
    reference = "structural sensitivity, §5"
    takes = ("method",)

    def changes(self, asked: StudyRequest) -> list[Change]:
        method = "svd" if asked.base.rounds else asked.base.method
        return [Change(self.name, f"rank {r}", asked.matrices, Compression(method, 0.0, r)) for r in UNIFORM_RANKS]
