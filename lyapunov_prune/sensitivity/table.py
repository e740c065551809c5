"""The studies by name: a new one is a file in `studies` and a row here."""

from __future__ import annotations

from lyapunov_prune.registry import Registry
from lyapunov_prune.sensitivity.study import Study

STUDIES = Registry[Study](
    "study",
    "lyapunov_prune.sensitivity.studies",
    (
        "matrix",
        "group",
        "layer",
        "component",
        "forward",
        "backward",
        "sparsity",
        "rank",
        "layer0",
        "cliff",
        "greedy",
        "greedy-rescored",
        "threshold",
        "removal",
    ),
)
