"""Where a decoder keeps the matrices of its layers, and how fused ones are split.

General rule: every `nn.Linear` and every `Conv1D` (GPT-2's, stored transposed) inside a layer is one matrix. A fused
projection is split as its family's entry says (`Family.fused`), or else stays one matrix, for
which all bounds hold as well. Experts and heads stacked in one parameter are one matrix each, and so is a bare
parameter that a module multiplies by (`models.experts.stacks`).

Left out: embeddings and the language-model head (often one tied tensor, and outside the layers), and in the layers what
`models.roles` lists with the reason: routers, convolutions and everything that is not a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.experts import stacks
from lyapunov_prune.models.families import BARE, Fused
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import Structure

# Part of a fused matrix: its role, its head (or None), and the start and stop of its rows.
Part = tuple[str, int | None, int, int]


@dataclass(frozen=True)
class Projection:
    """One matrix of a layer, output × input: rows `start … stop` of a parameter, or of a matrix stacked in it.

    `head` numbers the parts of a fused matrix, and the matrices of a stack without a router (heads, shared experts).
    """

    name: str  # of the module, with `:part` for a part of one
    layer: int
    component: str  # its role: the path inside the layer, and the part
    head: int | None
    expert: int | None
    module: str
    parameter: str
    start: int
    stop: int
    transposed: bool  # stored input × output
    stack: int = 0  # number of matrices in a bare parameter; 0 for the weight of a module
    routed: str = ""  # for an expert: the module that gets tokens and the router's choice

    def called(self, name: Callable[[str], str], layer: int) -> Projection:
        """The same matrix in a model, or in a part of this one, whose names and number of the layer are others."""
        return replace(self, layer=layer, name=name(self.name), module=name(self.module), routed=name(self.routed))

    @property
    def product(self) -> str:
        """The name of the product that uses the matrix; parts of a fused matrix share one, stacked matrices do not."""
        return self.name if self.stack else self.module

    @property
    def position(self) -> int | None:
        """The matrix's index in the stack of its parameter; None for the weight of a module."""
        return (self.expert if self.expert is not None else self.head or 0) if self.stack else None

    def stored(self, model: nn.Module) -> nn.Parameter:
        """The parameter that holds the matrix."""
        parameter: nn.Parameter = getattr(model.get_submodule(self.module), self.parameter)
        return parameter

    def weight(self, model: nn.Module) -> torch.Tensor:
        """A view of the matrix, output × input, detached."""
        return self.rows(self.stored(model).detach())

    def bias(self, model: nn.Module) -> torch.Tensor | None:
        """A view of the module's bias for this matrix (output,), detached; None if it has none."""
        bias = getattr(model.get_submodule(self.module), "bias", None)
        return None if bias is None else bias.detach()[self.start : self.stop]

    def rows(self, stored: torch.Tensor) -> torch.Tensor:
        """A view of this matrix in a tensor with the layout of its parameter."""
        own = stored
        if self.position is not None:
            own = (stored if stored.ndim == 3 else stored.unflatten(0, (self.stack, -1)))[self.position]
        return (own.T if self.transposed else own)[self.start : self.stop]


def weights_of(model: PreTrainedModel, projections: Iterable[Projection]) -> Iterator[tuple[Projection, torch.Tensor]]:
    """`projections`, sorted by layer, each with its weight, which stays in memory until the next one is requested."""
    for layer, here in groupby(projections, lambda p: p.layer):
        with layer_held(model, layer):
            yield from ((p, p.weight(model)) for p in here)


def shared_weights(model: nn.Module, projections: Iterable[Projection]) -> dict[str, torch.Tensor]:
    """The matrices by name. Names that share memory, in layers that share weights, share one tensor."""
    seen: dict[Any, torch.Tensor] = {}
    weights = {p.name: p.weight(model) for p in projections}
    return {name: seen.setdefault((W.data_ptr() or id(W), W.shape, W.stride()), W) for name, W in weights.items()}


def by_layer(projections: Iterable[Projection]) -> dict[int, list[Projection]]:
    """The matrices of each layer that has any."""
    found: dict[int, list[Projection]] = {}
    for p in projections:
        found.setdefault(p.layer, []).append(p)
    return found


def structure_projections(structure: Structure) -> tuple[Projection, ...]:
    """Every matrix of every layer of a decoder or image classifier, in order; raises as `layer_projections`."""
    return tuple(p for index in range(structure.num_layers) for p in layer_projections(structure, index))


def without_numbers(path: str) -> str:
    """The path of a module inside its layer without numbers, the same for all experts of a mixture."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def layer_projections(structure: Structure, index: int) -> Iterator[Projection]:
    """Every matrix of a layer, in order.

    Raises LyapunovPruneError for quantised weights, and for modules that do more than multiply by theirs.
    """
    layer, family = structure.layers[index], structure.family
    for path, module in layer.named_modules():
        place = ".".join(filter(None, (structure.layers_path, str(index), path)))
        role = without_numbers(path)
        if isinstance(module, nn.Linear | Conv1D) and type(module).__name__ not in BARE and not routes(layer, path):
            _require_plain(place, module)
            weight: Any = module.weight
            rows = weight.shape[isinstance(module, Conv1D)]
            for part, head, start, stop in _parts(family.fused.get(path.rpartition(".")[2]), structure.config, rows):
                suffix = f"{part}{'' if head is None else head}"
                yield Projection(
                    name=f"{place}:{suffix}" if part else place,
                    layer=index,
                    component=f"{role}.{part}" if part else role,
                    head=head,
                    expert=None,
                    module=place,
                    parameter="weight",
                    start=start,
                    stop=stop,
                    transposed=isinstance(module, Conv1D),
                )
        for stack in stacks(module, transposed=family.transposed):
            owner, inside = (f"{p}.{stack.owner}" if stack.owner else p for p in (place, role))
            rows, columns = stack.parameter.shape[-2:]
            if stack.parameter.ndim == 2:
                rows //= stack.count
            for i in range(stack.count):
                single = stack.count == 1 and stack.parameter.ndim == 2
                yield Projection(
                    name=f"{owner}.{stack.key}" if single else f"{owner}.{stack.key}:{i}",
                    layer=index,
                    component=f"{inside}.{stack.key}",
                    head=None if stack.routed or single else i,
                    expert=i if stack.routed else None,
                    module=owner,
                    parameter=stack.key,
                    start=0,
                    stop=columns if stack.transposed else rows,
                    transposed=stack.transposed,
                    stack=stack.count,
                    routed=place if stack.routed else "",
                )


def routes(layer: nn.Module, path: str) -> bool:
    """Whether the module at `path` inside the layer is a router or part of one."""
    names = path.split(".")
    for i, name in enumerate(names):
        beside = layer.get_submodule(".".join(names[:i]))
        if name == "router" or (name == "gate" and hasattr(beside, "experts")):
            return True
    return False


def _parts(fused: Fused | None, config: Any, rows: int) -> Iterator[Part]:
    """The parts of a matrix of so many rows: itself, or those of a fused one."""
    widths: list[tuple[str, int | None, int]] = [("", None, rows)]
    if fused == "gate, up":
        widths = [("gate", None, rows // 2), ("up", None, rows // 2)]
    elif fused == "grouped":
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        size = rows // (queries + 2 * keys)
        widths = [("q", None, queries * size), ("k", None, keys * size), ("v", None, keys * size)]
    elif fused:
        heads = config.num_attention_heads
        size = rows // (3 * heads)
        widths = [(part, head, size) for part in "qkv" for head in range(heads)]
        if fused == "heads by part":
            widths = [(part, head, size) for head in range(heads) for part in "qkv"]
    start = 0
    for part, head, width in widths:
        yield part, head, start, start + width
        start += width


def _require_plain(name: str, module: nn.Module) -> None:
    """Raise LyapunovPruneError unless the module only multiplies by its weight, which must not be quantised."""
    weight: Any = module.weight
    plain = weight.is_floating_point() and weight.ndim == 2
    if not plain or not (type(module).forward in (nn.Linear.forward, Conv1D.forward) or _multiplies(module)):
        what = "does more than multiply by its weight" if plain else f"holds no plain matrix but {weight.dtype}"
        raise LyapunovPruneError(f"{name} ({type(module).__name__}) {what}; load the model without quantisation")


def _multiplies(module: nn.Module) -> bool:
    """Whether the output of `module` is the product with its weight, and its bias, tried on one input."""
    weight: Any = module.weight
    held: dict[str, torch.Tensor] = dict(module.named_parameters())
    if weight.is_meta:  # streamed weights; any numbers show what the module does
        held = {key: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) for key, p in held.items()}
    weight = held["weight"]
    x = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).unsqueeze(0)
    output: Any = None
    with torch.no_grad():
        with suppress(RuntimeError):  # DeepSeek V4's takes its input in groups
            output = torch.func.functional_call(module, held, (x,))
        product = nn.functional.linear(x, weight, held.get("bias"))
    return isinstance(output, torch.Tensor) and torch.allclose(output, product, rtol=1e-2, atol=1e-4)


def groups(projections: tuple[Projection, ...]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Names of matrices by (component, layer): the paper's compression groups."""
    members: dict[tuple[str, int], list[str]] = {}
    for p in projections:
        members.setdefault((p.component, p.layer), []).append(p.name)
    return {key: tuple(names) for key, names in members.items()}
