"""Hooks on the modules of a model, gone when the block ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

Hooks = Iterable[tuple[nn.Module, Callable[..., Any]]]


@contextmanager
def hooked(*, before: Hooks = (), after: Hooks = ()) -> Iterator[None]:
    """Call hooks before and after the forwards of their modules inside the block.

    One before is given `(module, args, kwargs)` and may return other `(args, kwargs)`; one after is given
    `(module, args, kwargs, output)` and may return another output. Hooks on one module run in the order of the list.
    All are removed on the way out, also after an exception.
    """
    with ExitStack() as stack:
        for module, hook in before:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module, hook in after:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def keep_hooked(after: Hooks) -> None:
    """Call hooks after the forwards of their modules, as in `hooked`, for as long as the modules live.

    For a copy of a model that is dropped with its hooks.
    """
    for module, hook in after:
        module.register_forward_hook(hook, with_kwargs=True)
