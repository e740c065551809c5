"""torch and numpy for files that `--help` reads: each is imported when something of it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class Lazy:
    """A module that is imported at the first attribute asked of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import numpy as np
    import torch as torch
else:
    np, torch = Lazy("numpy"), Lazy("torch")
