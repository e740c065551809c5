"""pandas, imported with the first table: it takes 40 MB (80 with pyarrow) and no measurement needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.lazy import Lazy

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Lazy("pandas")
