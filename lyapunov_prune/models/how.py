"""How a matrix is stored in few bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class How(NamedTuple):
    """A matrix's type, and the importance of its columns, of experts by expert.

    If `given`, that is rounded in its place, every block of columns by itself: some types look at the whole row.
    """

    kind: Any
    importance: Any = None
    given: torch.Tensor | None = None
