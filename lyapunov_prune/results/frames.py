"""Frames by pandas, imported with the first table: it takes 40 MB (80 with pyarrow) and no measurement needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lyapunov_prune.lazy import Lazy

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Lazy("pandas")


def columns(of: object, *names: str, **renamed: str) -> dict[str, Any]:
    """The attributes `names` of a result, each a column of that name; `renamed` gives attributes by another column."""
    return {column: getattr(of, name) for column, name in (dict(zip(names, names, strict=True)) | renamed).items()}


def rows(of: object, index: str, *names: str, **renamed: str) -> pd.DataFrame:
    """A frame of `columns` behind a column `index` that counts its rows."""
    found = columns(of, *names, **renamed)
    return pd.DataFrame({index: range(len(next(iter(found.values())))), **found})
