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
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.experts import CHOSEN, COUNTS, SCORED, chosen_by, settings_of_experts, stacks
from lyapunov_prune.models.structure import Structure

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
        """Raise LyapunovPruneError unless `count` experts of a layer can be removed."""
        if not 1 <= count <= self.most:
            why = f"each token takes {self.chosen}"
            if self.groups > 1:
                why += f", from {self.picked} of {self.groups} groups, and two experts of a group have to stay"
            most = f"give 1 to {self.most}" if self.most else "none can go"
            raise LyapunovPruneError(f"cannot remove {count} of {self.experts} experts: {why}; {most}")
        if count % self.groups:
            raise LyapunovPruneError(
                f"cannot remove {count} of {self.experts} experts: the router chooses among {self.groups} groups of "
                f"the same size; give a multiple of {self.groups}"
            )

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

    def require(self, experts: Sequence[Sequence[int]], removed: Sequence[int] = ()) -> None:
        """Raise LyapunovPruneError unless `experts` of each layer can go, besides the whole layers `removed`."""
        for layer, gone in enumerate(experts):
            if gone and layer not in self.layers:
                raise LyapunovPruneError(f"layer {layer} has no experts; name those of {_some(self.layers)}")
            if layer not in self.layers or layer in removed:
                continue
            if not gone:
                raise LyapunovPruneError(
                    f"layer {layer} keeps all of its {self.router.experts} experts and other layers do not, but a "
                    "config has one number for all layers; remove the same number from each"
                )
            if gone[-1] >= self.router.experts:
                raise LyapunovPruneError(
                    f"layer {layer} has no expert {gone[-1]}: its experts are 0 to {self.router.experts - 1}"
                )
            self.router.require_removed(len(gone))
            if len({len(group) for group in self.router.groups_of(gone)}) > 1:
                raise LyapunovPruneError(
                    f"the experts {', '.join(map(str, gone))} of layer {layer} are not the same number in each of the "
                    f"{self.router.groups} groups that the router chooses among; remove the same number of each"
                )


def find_mixtures(structure: Structure) -> Mixtures:
    """The mixtures of a decoder, whose weights may be on the meta device.

    Raises LyapunovPruneError for a model without experts, for experts or a router of another form, for layers with
    different numbers of experts, and for experts shared by layers.
    """
    found = {i: mixture for i, layer in enumerate(structure.layers) if (mixture := _mixture(layer, i)) is not None}
    if not found:
        raise LyapunovPruneError(f"no layer of {type(structure.backbone).__name__} has experts; give --what layers")
    counts = {i: _count(structure.layers[i].get_submodule(mixture.experts)) for i, mixture in found.items()}
    first = min(counts)
    other = next((i for i, count in counts.items() if count != counts[first]), None)
    if other is not None:
        raise LyapunovPruneError(
            f"layer {first} has {counts[first]} experts and layer {other} has {counts[other]}; experts can only be "
            "removed if all layers have the same number"
        )
    owners: dict[int, int] = {}
    for i, mixture in found.items():
        tensor = next(structure.layers[i].get_submodule(mixture.experts).parameters())
        owner = owners.setdefault(id(tensor), i)
        if owner != i:
            raise LyapunovPruneError(
                f"layers {owner} and {i} share their experts; an expert would be removed from both; remove whole layers"
            )
    config = structure.config
    chosen = max(chosen_by(config), default=0)
    if min(chosen_by(config), default=0) != chosen:
        raise LyapunovPruneError(
            f"layers take {min(chosen_by(config))} to {chosen} experts for each token; experts can only be removed if "
            "all take the same number; remove whole layers"
        )
    if chosen < 1:
        raise LyapunovPruneError(
            f"the config of {type(structure.backbone).__name__} does not say how many experts each token takes "
            f"({' or '.join(CHOSEN)}); not supported"
        )
    groups = next((int(value) for name in _GROUPS if (value := getattr(config, name, None))), 1)
    picked = getattr(config, "topk_group", None) or groups
    return Mixtures(found, Router(counts[first], chosen, groups, picked))


def _mixture(layer: nn.Module, index: int) -> Mixture | None:
    """The mixture of a layer; None for a dense layer."""
    named = [name for name, _ in layer.named_modules() if name.rpartition(".")[2] == "experts"]
    if not named:
        return None
    experts = layer.get_submodule(named[0])
    count = _count(experts)
    if not count and hasattr(experts, "router"):
        raise LyapunovPruneError(
            f"layer {index} routes twice, to attentions in {named[0]} and to feed-forward blocks, and the config gives "
            "one number for both: a plan that lists the experts of one of them makes no model; remove whole layers "
            "instead"
        )
    if len(named) > 1 or not count:
        raise _unknown(index, f"{named[-1]} is no module with all experts stacked")
    block = named[0].rpartition(".")[0]
    inside = dict(layer.get_submodule(block).named_children())
    routers = [name for name in _ROUTERS if name in inside]
    if len(routers) != 1:
        raise _unknown(index, f"{block} has no router called {' or '.join(_ROUTERS)}")
    router = f"{block}.{routers[0]}"
    of_router = _tensors(layer, router, recurse=True)
    if table := next((n for n, t in of_router.items() if not t.is_floating_point() and t.ndim == 2), None):
        raise LyapunovPruneError(
            f"layer {index} sends a token to the experts that {table} lists for its id, whatever its state: of a token "
            "whose expert left, no score says which other one it should get, and the config gives one number of "
            "experts for all layers; remove whole layers instead"
        )
    scored = max([count, *(getattr(m, n, 0) for m in (experts, layer.get_submodule(router)) for n in SCORED)])
    matrices = [n for n, t in of_router.items() if t.ndim == 2 and len(t) == scored]
    if len(matrices) != 1:
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in of_router.items() if t.ndim == 2) or "no matrix"
        raise _unknown(index, f"its router holds {shapes}, not one matrix of {scored} rows")
    beside = {name: t for name, t in _tensors(layer, block).items() if t.ndim == 1}
    stacked = {
        name: Stacked(name, axis, t.shape[axis])
        for name, t in {**_tensors(layer, named[0]), **of_router, **beside}.items()
        for axis in (0, 1)
        if t.ndim > axis and t.shape[axis] in (count, scored) and (axis == 0 or len(t) == 1)
    }
    for stack in stacks(experts, ""):
        if stack.routed:
            name = ".".join(filter(None, (named[0], stack.owner, stack.key)))
            stacked.setdefault(name, Stacked(name, 0, stack.count))
    return Mixture(block, named[0], router, matrices[0], tuple(stacked.values()))


def _count(experts: nn.Module) -> int:
    """Number of experts stacked in the module; 0 if it stores them differently."""
    counts = {stack.count for stack in stacks(experts, "") if stack.routed}
    return counts.pop() if len(counts) == 1 else 0


def _tensors(layer: nn.Module, path: str, *, recurse: bool = False) -> dict[str, torch.Tensor]:
    module = layer.get_submodule(path)
    held = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    return {f"{path}.{name}": tensor for name, tensor in held}


def _unknown(layer: int, why: str) -> LyapunovPruneError:
    return LyapunovPruneError(f"layer {layer} has experts in an unknown form ({why}); remove whole layers instead")


def _some(layers: Mapping[int, Mixture]) -> str:
    return "layers " + ", ".join(map(str, sorted(layers)))


@torch.no_grad()
def drop_experts(model: PreTrainedModel, structure: Structure, gone: Mapping[int, Sequence[int]]) -> None:
    """Remove the experts `gone` of each layer from `model`, in place: their entries in stacked tensors, and the counts.

    `structure` is that of `model`; every mixture must lose equally many (`Mixtures.require`).
    """
    mixtures = find_mixtures(structure)
    count = mixtures.router.experts
    lost = len(next(iter(gone.values())))
    for index, experts in gone.items():
        layer, mixture = structure.layers[index], mixtures.layers[index]
        for stacked in mixture.stacked:
            path, _, key = stacked.name.rpartition(".")
            module = layer.get_submodule(path)
            before = getattr(module, key)
            kept = stacked.rows(before, [e for e in range(stacked.entries) if e not in experts])
            after = before.detach().index_select(stacked.axis, kept.to(before.device))
            if isinstance(before, nn.Parameter):
                after = nn.Parameter(after, before.requires_grad)
            setattr(module, key, after)
            if isinstance(module, nn.Linear):
                module.out_features = len(kept)
        counted = {count, *(stacked.entries for stacked in mixture.stacked)}
        parts = [layer.get_submodule(path) for path in (mixture.experts, mixture.router)]
        for module in (layer.get_submodule(mixture.block), *(m for part in parts for m in part.modules())):
            _lower_counts(module, counted, lost)
    for part in (model, structure.backbone, settings_of_experts(structure.config)):
        _lower_counts(part, {count}, lost)


def _lower_counts(holder: Any, counted: set[int], lost: int) -> None:
    """Lower the attributes of `holder` that hold a number of experts, one of `counted`, by `lost`."""
    for name in (*COUNTS, *SCORED, "num_routed_experts"):
        if (before := vars(holder).get(name)) in counted:
            setattr(holder, name, before - lost)
