"""The compression methods by name: a new one is a file in `methods` and a row here."""

from __future__ import annotations

from lyapunov_prune.compression.method import Method
from lyapunov_prune.registry import Registry

_METHODS = "lyapunov_prune.compression.methods"
METHODS = Registry[Method](
    "method",
    {
        "magnitude": f"{_METHODS}.magnitude:Magnitude",
        "weight-only": f"{_METHODS}.weight_only:WeightOnly",
        "wanda": f"{_METHODS}.wanda:Wanda",
        "sparsegpt": f"{_METHODS}.sparsegpt:SparseGPT",
        "svd": f"{_METHODS}.svd:SVD",
        "whitened-svd": f"{_METHODS}.whitened_svd:WhitenedSVD",
        "balanced": f"{_METHODS}.balanced:Balanced",
        "rtn": f"{_METHODS}.rtn:RoundToNearest",
        "gptq": f"{_METHODS}.gptq:GPTQ",
        "awq": f"{_METHODS}.awq:AWQ",
    },
)
