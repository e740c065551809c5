"""How the fused matrix of a block comes apart into channels, tried on the block itself.

Without some channels it must compute what it computes when their columns of the last matrix are zero. This also shows
that no channel depends on another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked, in_float32
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import random_ids
from lyapunov_prune.models.units import Unit, inside, select

REMEDY = "remove whole layers instead"
_TOKENS = 16
_SAME = 1e-2  # of the difference that masking makes, in float32

Attributes = dict[tuple[str, str], Any]  # by the path of a module and the name


def attributes_of(before: nn.Module, after: nn.Module) -> Attributes:
    """Numbers in the modules of `after` that are others in `before`."""
    found = {}
    for path, module in before.named_modules():
        new = vars(after.get_submodule(path))
        for name, value in vars(module).items():
            if type(value) in (int, tuple, list) and new.get(name) != value:
                found[path, name] = new.get(name)
    return found


def set_attributes(root: nn.Module, attributes: Attributes, below: str = "") -> None:
    """Write the attributes of modules of `root`, whose paths begin with `below`."""
    for (path, name), value in attributes.items():
        if f"{path}.".startswith(below):
            setattr(root.get_submodule(inside(path, below)), name, value)


def taken_apart(
    decoder: Decoder, units: Sequence[Unit], left: Mapping[Unit, int], attributes: Attributes
) -> dict[Unit, Unit]:
    """Each of `units` with the layout of its fused matrix, tried on one block of each kind in a forward."""
    blocks: dict[str, list[Unit]] = {}
    for unit in units:
        blocks.setdefault(unit.block, []).append(unit)
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for path, here in blocks.items():
        kind = type(decoder.model.get_submodule(path)), *((p.component, here[0].width) for p in here[0].into)
        kinds.setdefault(kind, []).append(path)
    calls = _calls(decoder, [paths[0] for paths in kinds.values()])
    layouts: dict[str, bool] = {}
    for first, *others in kinds.values():
        interleaved = _layout(decoder.model, first, blocks[first], left, attributes, calls)
        layouts |= dict.fromkeys((first, *others), interleaved)
    return {unit: replace(unit, interleaved=layouts[unit.block]) for unit in units}


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls(decoder: Decoder, paths: Sequence[str]) -> dict[str, _Call]:
    """The arguments of the modules at `paths` in a forward of random tokens, in float32."""
    seen: dict[str, _Call] = {}

    def note(path: str) -> Any:
        return lambda module, args, kwargs: seen.setdefault(path, in_float32((args, kwargs))) and None

    ids = random_ids(decoder.structure.config, 1, _TOKENS)
    with hooked(before=[(decoder.model.get_submodule(path), note(path)) for path in paths]):
        decoder.model(ids.to(decoder.model.device), use_cache=False)
    return seen


def _layout(
    model: PreTrainedModel,
    path: str,
    units: Sequence[Unit],
    left: Mapping[Unit, int],
    attributes: Attributes,
    calls: Mapping[str, _Call],
) -> bool:
    """Whether the fused matrices of the block at `path` are interleaved; raises LyapunovPruneError if it has no layout.

    The block without some channels has to compute what it does with their columns of the last matrix zero.
    """
    below = f"{path}."
    with layer_held(model, units[0].layer):
        block = copy.deepcopy(model.get_submodule(path)).float()
    vars(block).pop("forward", None)  # of a layer that reads its own weights
    args, kwargs = calls[path]
    generator = torch.Generator().manual_seed(0)
    kept = {unit: torch.randperm(unit.width, generator=generator)[: left[unit]].sort().values for unit in units}
    whole = _output(block(*args, **kwargs))
    masked = copy.deepcopy(block)
    for unit, channels in kept.items():
        W = unit.out.rows(getattr(masked.get_submodule(inside(unit.out.module, below)), unit.out.parameter).detach())
        gone = torch.ones(unit.width, dtype=torch.bool).index_fill(0, channels, False)
        W[:, gone.to(W.device)] = 0
    wanted = _output(masked(*args, **kwargs))
    for interleaved in (False, True):
        narrower = copy.deepcopy(block)
        select(narrower, [(replace(u, interleaved=interleaved), channels) for u, channels in kept.items()], below)
        set_attributes(narrower, attributes, below)
        if (_output(narrower(*args, **kwargs)) - wanted).norm() <= _SAME * (wanted - whole).norm():
            return interleaved
    raise LyapunovPruneError(
        f"hidden channels of {path} ({type(block).__name__}) cannot be removed one by one: without some of them it "
        f"does not compute what it computes with their columns set to zero; {REMEDY}"
    )


def _output(given: Any) -> torch.Tensor:
    output: torch.Tensor = given if isinstance(given, torch.Tensor) else given[0]
    return output
