"""The studies by name: a new one is a file in `studies` and a row here."""

from __future__ import annotations

from lyapunov_prune.registry import Registry
from lyapunov_prune.sensitivity.study import Study

_STUDIES = "lyapunov_prune.sensitivity.studies"
STUDIES = Registry[Study](
    "study",
    {
        "matrix": f"{_STUDIES}.matrix:Matrix",
        "group": f"{_STUDIES}.group:Group",
        "layer": f"{_STUDIES}.layer:Layer",
        "component": f"{_STUDIES}.component:Component",
        "forward": f"{_STUDIES}.forward:Forward",
        "backward": f"{_STUDIES}.backward:Backward",
        "sparsity": f"{_STUDIES}.sparsity:Sparsity",
        "rank": f"{_STUDIES}.rank:Rank",
        "layer0": f"{_STUDIES}.first_layer:FirstLayer",
        "cliff": f"{_STUDIES}.cliff:Cliff",
        "greedy": f"{_STUDIES}.greedy:Greedy",
        "greedy-rescored": f"{_STUDIES}.greedy_rescored:GreedyRescored",
        "threshold": f"{_STUDIES}.threshold:Threshold",
        "removal": f"{_STUDIES}.removal:Removal",
    },
)
