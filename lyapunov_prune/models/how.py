"""How a matrix is stored in few bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Stored = tuple[torch.Tensor, ...]  # a rounded matrix as a file holds it: tensors of its rows, and of parts of them


class How(NamedTuple):
    """A matrix's type, and the importance of its columns, of experts by expert. One that is `stored` is rounded."""

    kind: Any
    importance: Any = None
    stored: Stored | None = None
