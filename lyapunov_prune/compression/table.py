"""The compression methods by name: a new one is a file in `methods` and a row here."""

from __future__ import annotations

from lyapunov_prune.compression.method import Method
from lyapunov_prune.registry import Registry

METHODS = Registry[Method](
    "method",
    "lyapunov_prune.compression.methods",
    (
        "magnitude",
        "weight-only",
        "wanda",
        "sparsegpt",
        "svd",
        "whitened-svd",
        "balanced",
        "rtn",
        "gptq",
        "awq",
    ),
)
