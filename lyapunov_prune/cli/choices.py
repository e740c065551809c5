"""The names that options take, where help can list them without waiting for torch.

Those of a registry are taken from it; the others repeat a type of the package, and `tests/cli/test_choices.py` holds
them equal.
"""

from typing import TYPE_CHECKING, Literal

from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.export.table import formats_of
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.ranking.table import CRITERIA

DType = Literal["float32", "bfloat16", "float16", "float64"]

if TYPE_CHECKING:
    Criterion = str
    Method = str
    Reduction = str
    Stored = str
    Written = str
else:  # a type checker cannot read a registry
    Criterion = Literal[tuple(CRITERIA)]
    Method = Literal[tuple(METHODS)]
    Reduction = Literal[tuple(REDUCTIONS)]
    Stored = Literal[tuple(formats_of("compress"))]
    Written = Literal[tuple(formats_of("export"))]
