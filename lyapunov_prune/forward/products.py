"""The input and output of a matrix, whether its module is called or its weight is multiplied directly.

Mamba multiplies by the weight of `dt_proj` without calling it, so a hook on the module sees nothing. Experts and heads
stacked in one parameter have no module of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.device import eager_experts
from lyapunov_prune.models.experts import Routing, stacks
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import Projection


@dataclass(frozen=True, eq=False)
class Product:
    """`output = x Wᵀ` for the matrix called `name` (`Projection.product`); `x` is … × n.

    `rows_are_features`: the output is m × tokens. For an expert whose module gets the router's choice, `routed` holds
    the indices of its tokens among the module's inputs, and the router's weights of them. `called`: the module of the
    matrix was called, and the output has its bias.
    """

    name: str
    x: torch.Tensor
    output: torch.Tensor
    rows_are_features: bool = False
    routed: tuple[torch.Tensor, torch.Tensor] | None = None
    called: bool = False


Seen = Callable[[Product], None]
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_MULTIPLY = {*_MATMUL, torch.bmm, torch.baddbmm, nn.functional.linear}


@contextmanager
def watched_products(model: nn.Module, projections: Sequence[Projection], seen: Seen) -> Iterator[None]:
    """Call `seen` with every product of one of `projections` inside the block.

    A weight is recognised as the module's own parameter, or, in a stack, by its memory: casts of it and fused kernels
    are not seen. Experts and heads run one by one inside the block. Raises LyapunovPruneError if an expert gets other
    tokens than the router says.
    """
    modules = {p.module: model.get_submodule(p.module) for p in projections if not p.stack}
    called: list[str] = []
    running: list[_Running] = []

    def enter(name: str, *_: Any) -> None:
        called.append(name)

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        called.remove(name)
        seen(Product(name, args[0] if args else kwargs["input"], output, called=True))

    def start(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(_Running(name, runs[name], Routing.of(args, kwargs)))

    def end(*_: Any) -> None:
        running.pop()

    runs = _bare(model, projections)
    with (
        eager_experts(model) if any(p.expert is not None for p in projections) else nullcontext(),
        hooked(
            before=[
                *((module, partial(enter, name)) for name, module in modules.items()),
                *((model.get_submodule(name), partial(start, name)) for name in runs),
            ],
            after=[
                *((module, partial(leave, name)) for name, module in modules.items()),
                *((model.get_submodule(name), end) for name in runs),
            ],
        ),
        _Products(modules, called, running, seen),
    ):
        yield


@dataclass(frozen=True, eq=False)
class _Bare:
    """A parameter of `module` that stacks `pieces` matrices; `names` are the watched ones, by index."""

    module: nn.Module
    key: str
    pieces: int
    routed: bool
    names: dict[int, str] = field(default_factory=dict)

    def position(self, weight: Any) -> int | None:
        """The index in the stack of the matrix `weight`, a view of the parameter; None for any other tensor."""
        own: Any = self.module._parameters[self.key]
        if not isinstance(weight, torch.Tensor) or weight.dtype != own.dtype or weight.device != own.device:
            return None
        offset = weight.data_ptr() - own.data_ptr()
        return offset * self.pieces // own.nbytes if 0 <= offset < own.nbytes else None


def _bare(model: nn.Module, projections: Sequence[Projection]) -> dict[str, list[_Bare]]:
    """The bare parameters of the modules that multiply by `projections`, by the module's name.

    Includes parameters without projections, since the first product of an expert shows which tokens it gets.
    """
    runs: dict[str, list[_Bare]] = {}
    for p in projections:
        if p.position is None:
            continue
        if (name := p.routed or p.module) not in runs:
            module, runs[name] = model.get_submodule(name), []
            for s in stacks(module):
                pieces = len(s.parameter) if s.parameter.ndim == 3 else s.count
                runs[name].append(_Bare(module.get_submodule(s.owner), s.key, pieces, s.routed))
        holder = model.get_submodule(p.module)
        bare = next(b for b in runs[name] if b.module is holder and b.key == p.parameter)
        bare.names[p.position] = p.product
    return runs


@dataclass(frozen=True, eq=False)
class _Running:
    """A module with bare parameters while it runs."""

    name: str
    bare: Sequence[_Bare]
    routing: Routing | None
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def routed(self, bare: _Bare, expert: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.routing is None or not bare.routed:
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
    """Watches products with weights of modules that are not `called`, and bare parameters of those `running`."""

    def __init__(self, modules: dict[str, nn.Module], called: list[str], running: list[_Running], seen: Seen) -> None:
        super().__init__()
        self.modules, self.called, self.running, self.seen = modules, called, running, seen
        # The watched modules that had a weight of this id when it was last looked for.
        self.owners: dict[int, tuple[str, ...]] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for weight, x, rows_are_features in _factors(function, args) if function in _MULTIPLY else ():
            plain = rows_are_features or function is nn.functional.linear  # x W is not a product of W as such
            if plain and (name := self._name(weight)):
                output = function(*args, **(kwargs or {}))
                self.seen(Product(name, x.mT if rows_are_features else x, output, rows_are_features))
                return output
            for at in self.running[-1:]:
                for bare in at.bare:
                    position = bare.position(weight)
                    if position is None:
                        continue
                    if weight.ndim > 2:
                        added = args[0] if function is torch.baddbmm else 0
                        return added + self._one_by_one(bare, weight, x, rows_are_features)
                    output = function(*args, **(kwargs or {}))
                    routed = at.routed(bare, position, x)
                    if name := bare.names.get(position):
                        self.seen(Product(name, x.mT if rows_are_features else x, output, rows_are_features, routed))
                    return output
        return function(*args, **(kwargs or {}))

    def _name(self, weight: Any) -> str | None:
        if not isinstance(weight, nn.Parameter):
            return None
        own = self.owners.get(id(weight), ())
        if not own or any(getattr(self.modules[name], "weight", None) is not weight for name in own):
            own = tuple(name for name, module in self.modules.items() if getattr(module, "weight", None) is weight)
            self.owners[id(weight)] = own
        return next((name for name in own if name not in self.called), None)

    def _one_by_one(self, bare: _Bare, weight: torch.Tensor, x: torch.Tensor, rows_are_features: bool) -> torch.Tensor:
        """The products of all matrices of a stack, one by one; those of experts use only nonzero tokens."""
        every: list[torch.Tensor] = []
        for position, (W, own) in enumerate(zip(weight, x, strict=True)):
            given = own
            if bare.routed:
                sent = own.any(-1)  # tokens not sent to an expert reach it as zeros (Llama 4)
                given = own[sent]
            output = W @ own if rows_are_features else given @ W
            if name := bare.names.get(position):
                self.seen(Product(name, own.mT if rows_are_features else given, output, rows_are_features))
            if bare.routed:
                output = output.new_zeros(len(own), W.shape[1]).masked_scatter(sent.unsqueeze(1), output)
            every.append(output)
        return torch.stack(every)


def _factors(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[Any, Any, bool]]:
    """Yields (possible weight, other factor, whether the product is weight times factor) for a call of `function`."""
    if function in _MATMUL:
        yield args[0], args[1], True
        yield args[1], args[0], False
    elif function is torch.bmm or (function is nn.functional.linear and len(args) > 1):
        yield args[1], args[0], False
    elif function is torch.baddbmm:
        yield args[2], args[1], False
