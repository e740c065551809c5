"""torch and numpy for files that `--help` reads, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class Lazy:
    """A module that is imported on the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)


if TYPE_CHECKING:
    import numpy as np
    import torch as torch
else:
    np, torch = Lazy("numpy"), Lazy("torch")
