"""Study `sparsity`: all layers, at rising sparsities."""

from __future__ import annotations

from dataclasses import replace

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest

UNIFORM_SPARSITIES = (0.1, 0.3, 0.5, 0.7, 0.9)


class Sparsity(Study):
    """All layers at rising sparsities, or at falling bits if the method rounds."""

    help = "all layers, at rising sparsities or falling bits"
    reference = "structural sensitivity, §5"
    takes = ("method",)

    def changes(self, asked: StudyRequest) -> list[Change]:
        levels = replace(asked.base, rank=None).levels(UNIFORM_SPARSITIES)
        return [Change(self.name, level.amount, asked.matrices, level) for level in levels]
