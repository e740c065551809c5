"""Study `component`: each component in all layers."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change
from lyapunov_prune.sensitivity.study import Study, StudyRequest


class Component(Study):
    """A component in all layers together."""

    help = "each component in all layers"
    reference = "structural sensitivity, §6.1"

    def changes(self, asked: StudyRequest) -> list[Change]:
        names = dict.fromkeys(p.component for p in asked.matrices)
        return [
            Change(self.name, name, tuple(p for p in asked.matrices if p.component == name), asked.base)
            for name in names
        ]
