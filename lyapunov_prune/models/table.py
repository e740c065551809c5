"""The readers by name: a new one is a file in `readers` and a row here."""

from __future__ import annotations

from lyapunov_prune.models.reader import Reader
from lyapunov_prune.registry import Registry

READERS = Registry[Reader](
    "reader",
    "lyapunov_prune.models.readers",
    ("compressed-tensors",),
)
