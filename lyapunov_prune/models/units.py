"""The hidden channels of every feed-forward block and expert: which matrices lead into them, and which one out.

A block computes `y = W₂ h`, and channel j of `h` comes from row j of the matrices into it: of one, or of a gate and a
factor. These are two matrices, or one that holds both, as halves or row by row in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.roles import role
from lyapunov_prune.models.structure import Structure

# The channels that stay, ascending, by layer and by unit in it (`Decoder.units`); None where all do.
Kept = Sequence[Sequence[torch.Tensor | None]]
# Last matrices refitted to them (d × kept channels), by the indices of layer and unit.
Refits = Mapping[tuple[int, int], torch.Tensor]


@dataclass(frozen=True)
class Unit:
    """The `width` hidden channels of a feed-forward block, or of one expert.

    `into` are its matrices with one row per channel, or with two in one matrix (`fused`); then those of channel j are
    2j and 2j + 1 if they are `interleaved`, else j and j + `width`. `out` has one column per channel. `block` is the
    path of the innermost module that computes all of it. `biased` are those of `into` with a bias beside them.
    """

    layer: int
    block: str
    into: tuple[Projection, ...]
    out: Projection
    width: int
    fused: bool
    biased: tuple[Projection, ...] = ()
    interleaved: bool = False

    def rows(self, p: Projection, kept: torch.Tensor) -> torch.Tensor:
        """The rows of the parameter that holds `p`, one of `into`, that belong to the channels `kept`."""
        if not self.fused:
            return p.start + kept
        if self.interleaved:
            return torch.stack([2 * kept, 2 * kept + 1], 1).flatten()
        return torch.cat([kept, self.width + kept])

    def indices(self, kept: torch.Tensor) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
        """Every tensor with an entry per channel, and the indices of those `kept`."""
        by_parameter: dict[tuple[str, str], list[Projection]] = {}
        for p in self.into:
            by_parameter.setdefault((p.module, p.parameter), []).append(p)
        for (path, key), parts in by_parameter.items():
            p = parts[0]
            rows = torch.cat([self.rows(part, kept) for part in sorted(parts, key=lambda part: part.start)])
            yield WeightEntry(path, key, p.position, p.stack, 1 if p.transposed else 0), rows
            if p in self.biased:
                yield WeightEntry(path, _bias(p), p.position, p.stack, 0), rows
        p = self.out
        yield WeightEntry(p.module, p.parameter, p.position, p.stack, 0 if p.transposed else 1), kept


@dataclass(frozen=True)
class WeightEntry:
    """A tensor, or matrix `position` of `stack` in it, and its axis along which channels lie."""

    module: str
    key: str
    position: int | None
    stack: int
    axis: int

    def apart(self, stored: torch.Tensor) -> torch.Tensor:
        """The tensor with the matrices of a stack along an axis of their own."""
        return stored.unflatten(0, (self.stack, -1)) if self.flat(stored.ndim) else stored

    def flat(self, axes: int) -> bool:
        """Whether the matrices of the stack lie one below the other in a tensor of so many axes, as DBRX's do."""
        return bool(self.stack) and axes == 2 and not self.key.endswith("bias")

    def read(self, root: nn.Module) -> torch.Tensor:
        """The tensor, or its matrix in the stack."""
        stored: torch.Tensor = getattr(root.get_submodule(self.module), self.key).detach()
        return stored if self.position is None else self.apart(stored)[self.position]


# The units of every layer.
Units = tuple[tuple[Unit, ...], ...]


def inside(path: str, below: str) -> str:
    """The path of a module within the one whose path, with a dot, is `below`."""
    return f"{path}.".removeprefix(below).removesuffix(".")


def layer_units(structure: Structure, matrices: Iterable[Projection]) -> tuple[Unit, ...]:
    """The units of one layer, of these `matrices`, in order: those of the experts first. A layer may have none.

    Matrices that no known name leads to (`roles`), and shapes of another kind, make no unit.
    """
    into: dict[int | None, list[Projection]] = {}
    outs: list[Projection] = []
    for p in matrices:
        what = role(p.component)
        if what == "other":  # numbers in a path may say which matrix it is
            what = role(inside(p.module, f"{structure.layers_path}.{p.layer}."))
        if what == "mlp-in":
            into.setdefault(p.position, []).append(p)
        elif what == "mlp-out":
            outs.append(p)
    found: list[Unit] = []
    for out in outs:
        for path in _ancestors(structure, out):
            meeting = [p for p in into.get(out.position, ()) if f"{p.module}.".startswith(f"{path}.")]
            if meeting:
                found.extend(_unit(structure, path, meeting, out))
                break
    return tuple(sorted(found, key=lambda unit: unit.out.expert is None))


def _ancestors(structure: Structure, p: Projection) -> Iterator[str]:
    """The paths of modules around a matrix, innermost first, up to its layer; of a stack, first the module itself."""
    path, layer = p.module, f"{structure.layers_path}.{p.layer}"
    if p.stack:
        yield path
    while path != layer:
        path = path.rpartition(".")[0]
        yield path


def _unit(structure: Structure, path: str, into: Sequence[Projection], out: Projection) -> Iterator[Unit]:
    """The unit of these matrices; none if their shapes are others."""
    layer = structure.layers[out.layer]
    below = f"{structure.layers_path}.{out.layer}."

    def shape(p: Projection) -> tuple[int, ...]:
        stored: Any = getattr(layer.get_submodule(inside(p.module, below)), p.parameter)
        return tuple(p.rows(stored).shape)

    def is_biased(p: Projection) -> bool:
        return getattr(layer.get_submodule(inside(p.module, below)), _bias(p), None) is not None

    width = shape(out)[1]
    rows = [shape(p)[0] for p in into]
    block = min((path, *(p.routed for p in (*into, out) if p.routed)), key=len)
    fused = rows == [2 * width]
    if fused or rows in ([width], [width] * 2):
        yield Unit(out.layer, block, tuple(into), out, width, fused, tuple(filter(is_biased, into)))


def _bias(p: Projection) -> str:
    """The name of the bias beside the matrix."""
    return f"{p.parameter}_bias" if p.stack else "bias"


# For a tensor, or each matrix in its stack: where channels lie in it, and the indices of those that stay.
Parts = Mapping[int | None, tuple[WeightEntry, torch.Tensor]]


def tensors_of(kept: Iterable[tuple[Unit, torch.Tensor]]) -> dict[tuple[str, str], Parts]:
    """Every tensor with some of the channels, by the path of its module and its name, for the channels `kept`."""
    parts: dict[tuple[str, str], dict[int | None, tuple[WeightEntry, torch.Tensor]]] = {}
    for unit, channels in kept:
        for entry, index in unit.indices(channels):
            parts.setdefault((entry.module, entry.key), {})[entry.position] = entry, index
    return dict(parts)


def select(root: nn.Module, kept: Iterable[tuple[Unit, torch.Tensor]], below: str = "") -> None:
    """Keep only the channels `kept` of each unit, in place: every tensor that has some is replaced by a new one.

    The path of `root`, with a dot, is `below`.
    """
    for (path, key), parts in tensors_of(kept).items():
        module = root.get_submodule(inside(path, below))
        old: Any = getattr(module, key)
        setattr(module, key, nn.Parameter(selected(old.detach(), parts), old.requires_grad))


def selected(old: torch.Tensor, parts: Parts) -> torch.Tensor:
    """A new tensor of those indices of `old` that stay."""
    first, _ = next(iter(parts.values()))
    if first.position is None:
        return _selected(old, *parts[None]).contiguous()
    own = first.apart(old)
    # LongCat's stack also has entries of experts that compute nothing.
    each = [_selected(own[i], *parts.get(i, parts[0])) for i in range(len(own))]
    return torch.cat(each) if own.ndim > old.ndim else torch.stack(each)


def _selected(tensor: torch.Tensor, entry: WeightEntry, index: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(entry.axis, index.to(tensor.device))
