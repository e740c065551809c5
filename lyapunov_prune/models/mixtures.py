"""Where a decoder keeps its routed experts and their router, and removing some of the experts.

One form is known, that of transformers' fused experts: a module `experts` with `num_experts` parameters stacked along
their first axis, called with tokens, the experts chosen for each, and the router's weights; beside it a router with one
matrix of one row per expert. Biases that the router adds to its scores may be in either, or in their parent. Shared
experts have no router and stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.experts import CHOSEN, COUNTS, chosen_by, stacks
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


@dataclass(frozen=True)
class Mixture:
    """A layer's routed experts, by names inside the layer; `stacked` are the tensors with one entry per expert."""

    block: str
    experts: str
    router: str
    stacked: tuple[str, ...]


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
                    f"layer {layer} keeps all of its {self.router.experts} experts and others do not, and a config "
                    "gives one number for all layers; remove as many from each"
                )
            if gone[-1] >= self.router.experts:
                raise LyapunovPruneError(
                    f"layer {layer} has no expert {gone[-1]}: its experts are 0 to {self.router.experts - 1}"
                )
            self.router.require_removed(len(gone))
            if len({len(group) for group in self.router.groups_of(gone)}) > 1:
                raise LyapunovPruneError(
                    f"the experts {', '.join(map(str, gone))} of layer {layer} are not as many in each of the "
                    f"{self.router.groups} groups that the router chooses among; remove the same number of each"
                )


def find_mixtures(structure: Structure) -> Mixtures:
    """The mixtures of a decoder, whose weights may be on the meta device.

    Raises LyapunovPruneError for a model without experts, for experts or a router of another form, for layers with
    different numbers of experts, and for experts shared by layers.
    """
    found = {i: mixture for i, layer in enumerate(structure.layers) if (mixture := _mixture(layer, i)) is not None}
    if not found:
        raise LyapunovPruneError(
            f"no layer of {type(structure.backbone).__name__} has experts: nothing is routed; give --what layers"
        )
    counts = {i: _count(structure.layers[i].get_submodule(mixture.experts)) for i, mixture in found.items()}
    first = min(counts)
    other = next((i for i, count in counts.items() if count != counts[first]), None)
    if other is not None:
        raise LyapunovPruneError(
            f"layer {first} has {counts[first]} experts and layer {other} has {counts[other]}; experts are removed "
            "where all layers have the same number"
        )
    owners: dict[int, int] = {}
    for i, mixture in found.items():
        tensor = next(structure.layers[i].get_submodule(mixture.experts).parameters())
        owner = owners.setdefault(id(tensor), i)
        if owner != i:
            raise LyapunovPruneError(
                f"layers {owner} and {i} share their experts; an expert would leave both: remove whole layers"
            )
    config = structure.config
    chosen = max(chosen_by(config), default=0)
    if min(chosen_by(config), default=0) != chosen:
        raise LyapunovPruneError(
            f"layers take {min(chosen_by(config))} to {chosen} experts for each token; experts are removed where all "
            "take as many: remove whole layers"
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
    if len(named) > 1 or not _count(layer.get_submodule(named[0])):
        raise _unknown(index, f"{named[-1]} is no module with all experts stacked")
    block = named[0].rpartition(".")[0]
    inside = dict(layer.get_submodule(block).named_children())
    routers = [name for name in _ROUTERS if name in inside]
    if len(routers) != 1:
        raise _unknown(index, f"{block} has no router called {' or '.join(_ROUTERS)}")
    router, count = f"{block}.{routers[0]}", _count(layer.get_submodule(named[0]))
    matrices = {n: t for n, t in _tensors(layer, router, recurse=True).items() if t.ndim == 2}
    if len(matrices) != 1 or any(len(t) != count for t in matrices.values()):
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in matrices.items()) or "no matrix"
        raise _unknown(index, f"its router holds {shapes}, not one matrix of {count} rows")
    beside = {name: t for name, t in _tensors(layer, block).items() if t.ndim == 1}
    of_experts, of_router = _tensors(layer, named[0]), _tensors(layer, router, recurse=True)
    stacked = [name for name, t in {**of_experts, **of_router, **beside}.items() if t.ndim and len(t) == count]
    return Mixture(block, named[0], router, tuple(stacked))


def _count(experts: nn.Module) -> int:
    """Number of experts stacked in the module; 0 if it stores them differently."""
    stacked = {len(p) for p in experts.parameters(recurse=False) if p.ndim == 3}
    counts = {stack.count for stack in stacks(experts, "") if stack.routed}
    return counts.pop() if stacked == counts and len(counts) == 1 else 0  # LongCat stacks more


def _tensors(layer: nn.Module, path: str, *, recurse: bool = False) -> dict[str, torch.Tensor]:
    module = layer.get_submodule(path)
    held = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    return {f"{path}.{name}": tensor for name, tensor in held}


def _unknown(layer: int, why: str) -> LyapunovPruneError:
    return LyapunovPruneError(
        f"layer {layer} has experts in a form that is not known ({why}); remove whole layers instead"
    )


def _some(layers: Mapping[int, Mixture]) -> str:
    return "layers " + ", ".join(map(str, sorted(layers)))


@torch.no_grad()
def drop_experts(model: PreTrainedModel, structure: Structure, gone: Mapping[int, Sequence[int]]) -> None:
    """Remove the experts `gone` of each layer from `model`, in place: their entries in stacked tensors, and the counts.

    `structure` is that of `model`; every mixture must lose equally many (`Mixtures.require`).
    """
    mixtures = find_mixtures(structure)
    count = mixtures.router.experts
    left = count - len(next(iter(gone.values())))
    for index, experts in gone.items():
        layer, mixture = structure.layers[index], mixtures.layers[index]
        for name in mixture.stacked:
            path, _, key = name.rpartition(".")
            module = layer.get_submodule(path)
            before = getattr(module, key)
            kept = torch.tensor([e for e in range(count) if e not in experts], device=before.device)
            after = before.detach().index_select(0, kept)
            if isinstance(before, nn.Parameter):
                after = nn.Parameter(after, before.requires_grad)
            setattr(module, key, after)
            if isinstance(module, nn.Linear):
                module.out_features = left
        for path in (mixture.block, mixture.experts):
            _set_counts(layer.get_submodule(path), count, left)
        for module in layer.get_submodule(mixture.router).modules():
            _set_counts(module, count, left)
    for part in (model, structure.backbone, structure.config):
        _set_counts(part, count, left)


def _set_counts(holder: Any, before: int, after: int) -> None:
    for name in COUNTS:
        if vars(holder).get(name) == before:
            setattr(holder, name, after)
