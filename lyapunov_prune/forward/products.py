"""What enters and leaves a matrix: when its module is called, and when its weight is multiplied without that.

Mamba multiplies by the weight of `dt_proj` and never calls it, so that a hook on the module sees nothing. Experts that
a family keeps as one parameter are parts of that, and have no module of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.experts import Routing, expert_parameters
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.kernels import eager_experts
from lyapunov_prune.models.projections import Projection


@dataclass(frozen=True, eq=False)
class Product:
    """`output = x Wᵀ` of the matrix that is called `name` (`Projection.product`); `x` is … × n.

    `rows_are_features`: the output is m × tokens. For an expert whose module is given the router's choice, `routed` are
    the rows of its tokens among those that enter the module, and the router's weights of them.
    """

    name: str
    x: torch.Tensor
    output: torch.Tensor
    rows_are_features: bool = False
    routed: tuple[torch.Tensor, torch.Tensor] | None = None


Seen = Callable[[Product], None]
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@contextmanager
def watched_products(model: nn.Module, projections: Sequence[Projection], seen: Seen) -> Iterator[None]:
    """Every product with one of `projections` inside the block is handed to `seen`.

    A weight is told by being the module's own parameter, or an expert of it: a cast of it, and what a fused kernel
    does, are not seen. Experts run one after the other for as long. Raises LyapunovPruneError where an expert is given
    other tokens than the router says.
    """
    modules = {p.module: model.get_submodule(p.module) for p in projections if p.expert is None}
    experts = {p.module: model.get_submodule(p.module) for p in projections if p.expert is not None}
    called: list[str] = []
    running: list[_Running] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: called.append(name)

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
            called.remove(name)
            seen(Product(name, args[0], output))

        return hook

    def start(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: running.append(_Running(name, module, Routing.of(args, kwargs)))

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running.pop()

    chosen = {p.product for p in projections}
    with (
        eager_experts(model) if experts else nullcontext(),
        hooked(
            before=[
                *((module, enter(name)) for name, module in modules.items()),
                *((module, start(name)) for name, module in experts.items()),
            ],
            after=[
                *((module, leave(name)) for name, module in modules.items()),
                *((module, end) for module in experts.values()),
            ],
        ),
        _Products(modules, called, running, lambda product: seen(product) if product.name in chosen else None),
    ):
        yield


@dataclass(frozen=True, eq=False)
class _Running:
    """A module of experts while it runs; `taken` is the expert that was last taken out of each parameter."""

    name: str
    module: nn.Module
    routing: Routing | None
    taken: dict[str, tuple[int, torch.Tensor]] = field(default_factory=dict)
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def key(self, parameter: torch.Tensor) -> str | None:
        return next((key for key, own, _ in expert_parameters(self.module) if own is parameter), None)

    def routed(self, expert: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.routing is None:
            return None
        if expert not in self.rows:
            self.rows[expert] = self.routing.of_expert(expert)
            if not self.routing.holds(self.rows[expert][0], x):
                raise LyapunovPruneError(
                    f"expert {expert} of {self.name} is not given the tokens that its router chose; use a method "
                    "without calibration (--method magnitude, --allocation uniform)"
                )
        return self.rows[expert]


class _Products(TorchFunctionMode):
    """Products with a weight whose module is not `called` at the moment, and with the experts that are `running`."""

    def __init__(self, modules: dict[str, nn.Module], called: list[str], running: list[_Running], seen: Seen) -> None:
        super().__init__()
        self.modules, self.called, self.running, self.seen = modules, called, running, seen

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in _MATMUL:
            if name := self._name(args[0]):
                self.seen(Product(name, args[1].transpose(-1, -2), output, rows_are_features=True))
            self._expert(args[0], args[1], output)
        elif function is nn.functional.linear and len(args) > 1:
            if name := self._name(args[1]):
                self.seen(Product(name, args[0], output))
            self._expert(args[0], args[1], output)
        elif self.running and function is torch.Tensor.__getitem__ and (key := self.running[-1].key(args[0])):
            if output.ndim == 2:
                self.running[-1].taken[key] = int(args[1]), output
        elif self.running and function is torch.bmm and (key := self.running[-1].key(args[1])):
            return self._all_experts(key, args[0], args[1])
        return output

    def _name(self, weight: Any) -> str | None:
        if not isinstance(weight, nn.Parameter):
            return None
        own = (name for name, module in self.modules.items() if getattr(module, "weight", None) is weight)
        return next((name for name in own if name not in self.called), None)

    def _expert(self, x: torch.Tensor, weight: Any, output: torch.Tensor) -> None:
        for at in self.running[-1:]:
            for key, (expert, taken) in at.taken.items():
                if taken is weight:
                    self.seen(Product(f"{at.name}.{key}:{expert}", x, output, routed=at.routed(expert, x)))

    def _all_experts(self, key: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The products of all experts (experts × tokens × …) one by one, each with the tokens that are not zero."""
        every: list[torch.Tensor] = []
        for expert, (rows, W) in enumerate(zip(x, weight, strict=True)):
            own = rows.any(-1)  # what is not sent to an expert reaches it as zeros (Llama 4)
            output = rows[own] @ W
            self.seen(Product(f"{self.running[-1].name}.{key}:{expert}", rows[own], output))
            every.append(output.new_zeros(len(rows), W.shape[1]).masked_scatter(own.unsqueeze(1), output))
        return torch.stack(every)
