"""Study `threshold`: layer 0 by Wanda, at rising sparsities, to find s*."""

from __future__ import annotations

from lyapunov_prune.sensitivity.changes import Change, Compression
from lyapunov_prune.sensitivity.study import Study, StudyRequest

THRESHOLD_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class Threshold(Study):
    """Layer 0 by Wanda at rising sparsities, which gives the threshold s*."""

    help = "layer 0 by Wanda at rising sparsities, to find the threshold s*"
    reference = "structural sensitivity, §6.3, Table 2"
    takes = ("limit",)

    def changes(self, asked: StudyRequest) -> list[Change]:
        first = asked.layers[min(asked.layers)]
        return [
            Change(self.name, f"sparsity {s:g}", first, Compression("wanda", s, None)) for s in THRESHOLD_SPARSITIES
        ]
