"""A model in use: by one thread at a time, and with hooks on its modules for the length of a block.

A model serves one thread at a time, because measurements hook into it and swap its weights and its mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.utils import ModelOutput

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


@dataclass(frozen=True)
class Call:
    """One call of the module at `path` of a layer; `given` and `returned` are its states.

    `output` is all that it returned; `alone` says whether it was given no other tensor.
    """

    path: str
    module: nn.Module
    given: torch.Tensor
    returned: torch.Tensor
    output: Any = None
    alone: bool = True

    def feeds(self, other: Call) -> bool:
        """Whether what it returned is in the memory of what `other` was given, in whatever shape."""
        return self.returned.data_ptr() == other.given.data_ptr() and self.returned.numel() == other.given.numel()


@contextmanager
def calls_noted(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[list[Call]]:
    """The calls inside the block of `modules`, by path, that were given a state and returned one, in order."""
    calls: list[Call] = []

    def note(path: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        x = given[0] if given else named.get("hidden_states")
        y = output[0] if isinstance(output, tuple | list | ModelOutput) and output else output
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            alone = sum(isinstance(each, torch.Tensor) for each in (*given, *named.values())) == 1
            calls.append(Call(path, module, x, y, output, alone))

    with hooked(after=[(module, partial(note, path)) for path, module in modules]):
        yield calls


def in_float32(value: Any) -> Any:
    """Copies of all floating tensors in nested arguments of a call, in float32."""
    if isinstance(value, torch.Tensor):
        return value.detach().float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: in_float32(each) for key, each in value.items()}
    if (isinstance(value, tuple) and not hasattr(value, "_fields")) or isinstance(value, list):
        return type(value)(in_float32(each) for each in value)
    return value


Hooks = Iterable[tuple[nn.Module, Callable[..., Any]]]


@contextmanager
def hooked(*, before: Hooks = (), after: Hooks = ()) -> Iterator[None]:
    """Run hooks before and after the forwards of their modules inside the block.

    A hook in `before` gets `(module, args, kwargs)` and may return new `(args, kwargs)`; one in `after` gets `(module,
    args, kwargs, output)` and may return a new output. Hooks on one module run in list order. All are removed on exit,
    also after an exception.
    """
    with ExitStack() as stack:
        for module, hook in before:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module, hook in after:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def overridden(module: nn.Module, method: Callable[..., Any], name: str = "forward") -> Iterator[None]:
    """Inside the block, `method` is the one of this name; after it, the one before, of the module or of its class."""
    before = module.__dict__.get(name)
    module.__dict__[name] = method
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before
