"""A model serves one thread at a time, because measurements hook into it and swap its weights and its mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lyapunov_prune.errors import LyapunovPruneError

# Not an attribute of the model: models are copied and saved, and a lock cannot be.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_NEW = threading.Lock()


@contextmanager
def held(*models: nn.Module) -> Iterator[None]:
    """Only this thread uses `models` inside the block; it may hold them again in nested blocks.

    Raises LyapunovPruneError at once if another thread holds one of them, since each would see the other's changes.
    """
    with ExitStack() as stack:
        for model in models:
            with _NEW:
                lock = _LOCKS.setdefault(model, threading.RLock())
            if not lock.acquire(blocking=False):
                raise LyapunovPruneError(
                    f"another thread is using this {type(model).__name__}, which only one can do at a time; wait for "
                    "it, or give each thread a copy (copy.deepcopy)"
                )
            stack.callback(lock.release)
        yield
