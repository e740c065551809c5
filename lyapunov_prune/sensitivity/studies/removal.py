"""Study `removal`: each layer removed."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Removal(Study):
    """Every layer removed alone."""

    help = "each layer removed"
    reference = "structural sensitivity, §6.5"
    takes = ()

    def changes(self, asked: StudyRequest) -> list[Change]:
        return [Change(self.name, f"layer {k}", remove=(k,)) for k in asked.layers]
