"""Study `matrix`: each matrix."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Matrix(Study):
    """Every matrix compressed alone."""

    help = "each matrix"
    reference = "structural sensitivity, §6.1"

    def changes(self, asked: StudyRequest) -> list[Change]:
        return [Change(self.name, p.name, (p,), asked.base) for p in asked.matrices]
