"""The names that options take, where help can list them without waiting for torch.

Each is the names of a table or type of the package; `tests/cli/test_choices.py` holds them equal.
"""

from typing import Literal

Criterion = Literal["rho", "bi", "blend", "angular", "kl", "oracle", "best", "from-end", "random"]
Derivative = Literal["difference", "jvp"]
DeviceMap = Literal["auto"]
DType = Literal["float32", "bfloat16", "float16", "float64"]
Format = Literal["plain", "compact"]
Stored = Literal["plain", "compressed-tensors", "compact"]
Importance = Literal["taylor", "learned"]
Method = Literal["magnitude", "weight-only", "wanda", "sparsegpt", "svd", "whitened-svd", "balanced", "rtn"]
Pooling = Literal["energy", "token"]
ReadAt = Literal["layer", "branch"]
Reduction = Literal["identity", "mean-gate", "scaled", "affine"]
Split = Literal["evaluation", "all", "calibration"]
StudyMethod = Literal["magnitude", "weight-only", "wanda", "sparsegpt", "svd", "whitened-svd", "balanced"]
What = Literal["layers", "attention", "mlp", "activation"]
