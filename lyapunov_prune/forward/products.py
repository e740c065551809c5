"""What enters and leaves a matrix: when its module is called, and when its weight is multiplied without that.

Mamba multiplies by the weight of `dt_proj` and never calls it, so that a hook on the module sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lyapunov_prune.models.hooked import hooked

# Called with the name of a matrix, its input (… × n), its output, and whether features are rows of that (m × tokens).
Seen = Callable[[str, torch.Tensor, torch.Tensor, bool], None]
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@contextmanager
def watched_products(modules: Mapping[str, nn.Module], seen: Seen) -> Iterator[None]:
    """Every product with the weight of one of `modules` (by name) inside the block is handed to `seen`.

    A weight is told by being the module's own parameter: a cast of it, and what a fused kernel does, are not seen.
    """
    called: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: called.append(name)

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
            called.remove(name)
            seen(name, args[0], output, False)

        return hook

    with (
        hooked(
            before=[(module, enter(name)) for name, module in modules.items()],
            after=[(module, leave(name)) for name, module in modules.items()],
        ),
        _Products(modules, called, seen),
    ):
        yield


class _Products(TorchFunctionMode):
    """Products with a weight whose module is not `called` at the moment."""

    def __init__(self, modules: Mapping[str, nn.Module], called: list[str], seen: Seen) -> None:
        super().__init__()
        self.modules, self.called, self.seen = modules, called, seen

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in _MATMUL and (name := self._name(args[0])):
            self.seen(name, args[1].transpose(-1, -2), output, True)
        elif function is nn.functional.linear and len(args) > 1 and (name := self._name(args[1])):
            self.seen(name, args[0], output, False)
        return output

    def _name(self, weight: Any) -> str | None:
        if not isinstance(weight, nn.Parameter):
            return None
        own = (name for name, module in self.modules.items() if getattr(module, "weight", None) is weight)
        return next((name for name in own if name not in self.called), None)
