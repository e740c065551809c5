"""Where a decoder keeps its routed experts and their router, and removing some of the experts.

One form is known, that of transformers' fused experts: a module `experts` whose parameters are stacked by expert,
called with tokens, the experts chosen for each, and the router's weights; beside it a router whose matrix has one row
per expert. Biases that the router adds to its scores may be in either, or in their parent. A router may score more than
the experts: shared ones (Inkling), ones that compute nothing (LongCat), a skip (Zaya). Their rows come last and stay,
and so do the shared experts themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.experts import CHOSEN, COUNTS, SCORED, chosen_by, settings_of_experts, stacks
from lyapunov_prune.models.sharing import shared_with
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.models.units import WeightEntry

# Names of the number of groups of experts.
_GROUPS = ("n_group", "num_expert_group")
_ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class Router:
    """How a router chooses: `chosen` of `experts` for each token, from `picked` of `groups` of neighbouring experts."""

    experts: int
    chosen: int
    groups: int = 1
    picked: int = 1

    @property
    def most(self) -> int:
        """The largest number of experts that can be removed, equally many from every group."""
        # A group is scored by its two best experts.
        stay = self.chosen if self.groups == 1 else max(2, -(-self.chosen // self.picked))
        return max(0, self.groups * (self.experts // self.groups - stay))

    def require_removed(self, count: int) -> None:
        """Raise LyapunovPruneError unless `count` experts of a layer can be removed, equally many from every group."""
        if 1 <= count <= self.most and count % self.groups == 0:
            return
        why, give = f"each token takes {self.chosen}", f"give 1 to {self.most}"
        if self.groups > 1:
            why += f", from {self.picked} of {self.groups} groups of one size, of which each keeps two"
            give = f"give a multiple of {self.groups}, {self.most} at most"
        remedy = give if self.most else "none can go"
        raise LyapunovPruneError(f"cannot remove {count} of {self.experts} experts: {why}; {remedy}")

    def groups_of(self, experts: Sequence[int]) -> list[list[int]]:
        """`experts` split by group."""
        size = self.experts // self.groups
        return [[e for e in experts if e // size == group] for group in range(self.groups)]


class Stacked(NamedTuple):
    """A tensor of a layer with `entries` parts of one size along `axis`: one per expert, then those of no expert."""

    name: str
    axis: int
    entries: int

    def rows(self, tensor: torch.Tensor, entries: Sequence[int]) -> torch.Tensor:
        """The indices along `axis` of these entries of `tensor`."""
        size = tensor.shape[self.axis] // self.entries
        first = torch.tensor(list(entries), dtype=torch.long).unsqueeze(1) * size
        return (first + torch.arange(size)).flatten()

    def entry(self, name: str) -> WeightEntry:
        """The tensor as one that loses entries, by its full `name`."""
        path, _, key = name.rpartition(".")
        return WeightEntry(path, key, None, 0, self.axis)


@dataclass(frozen=True)
class Mixture:
    """A layer's routed experts, by names inside the layer. `scores` is the router's matrix, one of the `stacked`."""

    block: str
    experts: str
    router: str
    scores: str
    stacked: tuple[Stacked, ...]


@dataclass(frozen=True)
class Mixtures:
    """The mixtures of a model, by layer; all share `router`, because the config has one setting for all."""

    layers: Mapping[int, Mixture]
    router: Router

    def require(self, experts: Mapping[int, Sequence[int]], removed: Sequence[int] = ()) -> None:
        """Raise LyapunovPruneError unless `experts` of each layer can go, besides the whole layers `removed`."""
        for layer in sorted(experts.keys() | (self.layers.keys() - {*removed})):
            gone = experts.get(layer, ())
            if why := self._why_not(layer, gone):
                layers = ", ".join(map(str, sorted(self.layers)))
                raise LyapunovPruneError(f"{why}; remove the same number from each of layers {layers}")
            self.router.require_removed(len(gone))

    def _why_not(self, layer: int, gone: Sequence[int]) -> str | None:
        router = self.router
        if layer not in self.layers:
            return f"layer {layer} has no experts"
        if not gone:
            return (
                f"layer {layer} keeps all of its {router.experts} experts, and a config has one number for all layers"
            )
        if gone[-1] >= router.experts:
            return f"layer {layer} has no expert {gone[-1]}: its experts are 0 to {router.experts - 1}"
        if len(gone) % router.groups == 0 and len(set(map(len, router.groups_of(gone)))) > 1:
            return (
                f"experts {', '.join(map(str, gone))} of layer {layer} are not the same number in each of the "
                f"{router.groups} groups that the router chooses among"
            )
        return None


def find_mixtures(structure: Structure) -> Mixtures:
    """The mixtures of a decoder, whose weights may be on the meta device.

    Raises LyapunovPruneError for a model without experts, for experts or a router of another form, for layers with
    different numbers of experts, and for experts shared by layers.
    """
    read = {i: _mixture(layer) for i, layer in enumerate(structure.layers)}
    found = {i: mixture for i, mixture in read.items() if isinstance(mixture, Mixture)}
    counts = {i: _count(structure.layers[i].get_submodule(mixture.experts)) for i, mixture in found.items()}
    config = structure.config
    chosen = chosen_by(config)
    unknown = next((f"layer {i} {why}" for i, why in read.items() if isinstance(why, str)), None)
    if why := unknown or _unlike(structure, found, counts, chosen):
        raise LyapunovPruneError(f"{why}; remove whole layers (--what layers)")
    groups = next((int(value) for name in _GROUPS if (value := getattr(config, name, None))), 1)
    picked = getattr(config, "topk_group", None) or groups
    return Mixtures(found, Router(min(counts.values()), max(chosen), groups, picked))


def _unlike(
    structure: Structure, found: Mapping[int, Mixture], counts: Mapping[int, int], chosen: Sequence[int]
) -> str | None:
    """Why one setting cannot describe the mixtures of a model; None if it can."""
    kind = type(structure.backbone).__name__
    if not found:
        return f"no layer of {kind} has experts"
    first = min(counts)
    for i, mixture in found.items():
        if counts[i] != counts[first]:
            return f"layer {first} has {counts[first]} experts and layer {i} has {counts[i]}"
        if owner := next(
            (j for name, j in shared_with(structure.layers, i).items() if name.startswith(f"{mixture.experts}.")), None
        ):
            return f"layers {i} and {owner} share their experts, and an expert would be removed from both"
    if min(chosen, default=0) != max(chosen, default=0):
        return f"layers take {min(chosen)} to {max(chosen)} experts for each token, and not all the same number"
    if max(chosen, default=0) < 1:
        return f"the config of {kind} does not say how many experts each token takes ({' or '.join(CHOSEN)})"
    return None


def _mixture(layer: nn.Module) -> Mixture | str | None:
    """The mixture of a layer; None for a dense layer; words that follow "layer 3" if its experts cannot be removed."""
    named = [name for name, _ in layer.named_modules() if name.rpartition(".")[2] == "experts"]
    if not named:
        return None
    experts = layer.get_submodule(named[0])
    count = _count(experts)
    if len(named) > 1 or not count:
        return _unknown(f"{named[-1]} is no module with all experts stacked")
    block = named[0].rpartition(".")[0]
    inside = dict(layer.get_submodule(block).named_children())
    routers = [name for name in _ROUTERS if name in inside]
    if len(routers) != 1:
        return _unknown(f"{block} has no router called {' or '.join(_ROUTERS)}")
    router = f"{block}.{routers[0]}"
    of_router = _tensors(layer, router, recurse=True)
    if table := next((n for n, t in of_router.items() if not t.is_floating_point() and t.ndim == 2), None):
        return (
            f"sends a token to the experts that {table} lists for its id, whatever its state, so that no score says "
            "which other expert it should get"
        )
    scored = max([count, *(getattr(m, n, 0) for m in (experts, layer.get_submodule(router)) for n in SCORED)])
    matrices = [n for n, t in of_router.items() if t.ndim == 2 and len(t) == scored]
    if len(matrices) != 1:
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in of_router.items() if t.ndim == 2) or "no matrix"
        return _unknown(f"its router holds {shapes}, not one matrix of {scored} rows")
    beside = {name: t for name, t in _tensors(layer, block).items() if t.ndim == 1}
    stacked = {
        name: Stacked(name, axis, t.shape[axis])
        for name, t in {**_tensors(layer, named[0]), **of_router, **beside}.items()
        for axis in (0, 1)
        if t.ndim > axis and t.shape[axis] in (count, scored) and (axis == 0 or len(t) == 1)
    }
    for stack in stacks(experts):
        if stack.routed:
            name = ".".join(filter(None, (named[0], stack.owner, stack.key)))
            stacked.setdefault(name, Stacked(name, 0, stack.count))
    return Mixture(block, named[0], router, matrices[0], tuple(stacked.values()))


def _count(experts: nn.Module) -> int:
    """Number of experts stacked in the module; 0 if it stores them differently."""
    counts = {stack.count for stack in stacks(experts) if stack.routed}
    return counts.pop() if len(counts) == 1 else 0


def _tensors(layer: nn.Module, path: str, *, recurse: bool = False) -> dict[str, torch.Tensor]:
    module = layer.get_submodule(path)
    held = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    return {f"{path}.{name}": tensor for name, tensor in held}


def _unknown(why: str) -> str:
    return f"has experts in an unknown form ({why})"


def lower_count(config: Any, count: int, lost: int) -> None:
    """Let a text `config` of `count` experts say that `lost` of them are gone."""
    holder = settings_of_experts(config)
    for name in COUNTS:
        if vars(holder).get(name) == count:
            setattr(holder, name, count - lost)
