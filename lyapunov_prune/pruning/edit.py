"""A change of structure as a new config and a map of names; every way of carrying it out reads these.

`edit_of` makes the config of what a plan leaves, and builds the model of its class on the meta device. That model knows
how its modules are numbered, and which tensors it has, of which shapes; the map says where each comes from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.models.adaptations import Cut
from lyapunov_prune.models.compact import lost_attentions
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.dispatched import place_alike
from lyapunov_prune.models.left_out import forget_heads
from lyapunov_prune.models.mixtures import Stacked, lower_count
from lyapunov_prune.models.rebuilt import built, take_over
from lyapunov_prune.models.settings import lost_attention, slice_settings
from lyapunov_prune.models.structure import backbone_of
from lyapunov_prune.models.units import Parts, Unit, selected, tensors_of
from lyapunov_prune.models.width import Width, find_width
from lyapunov_prune.progress import warn
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ChannelsGone

# What a module learnt while it ran, which no config says: its mode, and whether RWKV has scaled its weights for it.
_LEARNT = ("training", "layers_are_rescaled")
_OTHERS = "remove other layers"


@dataclass(frozen=True, eq=False)
class Edit:
    """The model `made`, on the meta device, and where its tensors are in the model that it is made of.

    `modules` gives the name there of each module of `made`. `parts` are the indices that stay of each tensor that loses
    some, by its name there. `channels` are those that stay of each unit that loses some. `new` holds the parameters of
    `made`, by their names in it, that are none of the other model.
    """

    made: Decoder
    kept: tuple[int, ...]
    modules: Mapping[str, str]
    parts: Mapping[str, Parts]
    channels: Sequence[tuple[Unit, torch.Tensor]]
    new: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, str]:
        """The name of each tensor of `made` in the model that it is made of."""
        split = ((name, *name.rpartition(".")) for name in self.made.model.state_dict())
        return {name: f"{self.modules[path]}.{key}" for name, path, _, key in split}


def edit_of(decoder: Decoder, plan: PruningPlan, width: Width | None = None) -> Edit:
    """The edit that leaves `decoder`, whose weights may be on the meta device, without the layers of `plan`.

    Experts and channels of layers that stay leave with them. `width` is that of the model if channels do and they
    cannot be looked for in it (`models.width.find_width`). Raises LyapunovPruneError if the family's checkpoint format
    cannot express what remains.
    """
    model, original, family, kept = decoder.model, decoder.structure, decoder.family, plan.kept
    outer, config = copy.deepcopy((model.config, original.config))
    cut = Cut(outer, config, original.config, original.layers, kept)
    if plan.remove:
        forget_heads(outer)
        if gone := slice_settings(config, original.count, kept, original.num_layers):
            warn(
                f"{', '.join(sorted(gone))} in the config names layers by the numbers of the original, which is "
                "unknown here: left out of the config of the pruned model"
            )
        why = family.adapt(cut) or lost_attention(original.config, config)  # `adapt` may say where attentions are
        if why := why or lost_attentions(config):
            raise LyapunovPruneError(why)
    stacked: list[tuple[str, Stacked, Sequence[int]]] = [
        (f"{original.layers_path}.{layer}.{each.name}", each, [e for e in range(each.entries) if e not in gone])
        for layer, gone in plan.gone.experts_gone.items()
        for each in decoder.mixtures.layers[layer].stacked
    ]
    if stacked:
        lower_count(config, decoder.mixtures.router.experts, len(next(iter(plan.gone.experts_gone.values()))))
    channels = []
    if isinstance(plan.gone, ChannelsGone):
        width = width or find_width(decoder)
        channels = _channels(plan, width)
        unit, stay = channels[0]
        width.setting.put(config, len(stay) * width.width // unit.width)
    with reported(f"{_wrong(model)}: the model cannot be built without them", _OTHERS, Exception):
        new = built(type(model), outer)
        layers: Any = new.get_submodule(original.layers_path)
    structure = replace(original, backbone=backbone_of(new, original.layers_path), layers=layers, config=config)
    named = ((original.renamed(name, kept), name) for name, _ in model.named_modules(remove_duplicate=False))
    moved = ((family.renamed(cut, after), name) for after, name in named if after is not None)
    modules = {after: name for after, name in moved if after is not None}
    stacked += _tables(decoder, new, kept)
    before = model.state_dict()
    parts: dict[str, Parts] = {
        name: {None: (each.entry(name), each.rows(before[name], stay))} for name, each, stay in stacked
    }
    parts |= {f"{path}.{key}": found for (path, key), found in tensors_of(channels).items()}
    edit = Edit(Decoder(new, structure), kept, modules, parts, channels)
    if wrong := next(_unlike(model, edit), None):
        raise LyapunovPruneError(f"{_wrong(model)}: by its config {wrong} is another module than it was; {_OTHERS}")
    return edit


def _unlike(model: PreTrainedModel, edit: Edit) -> Iterator[str]:
    """The modules of `model` whose class, or a shape in them, is another than that of the module made of them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in edit.made.model.named_modules():
        name = edit.modules.get(path)
        old: Any = None if name is None else modules[name]
        same = type(old) is type(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            stored, parts = getattr(old, key, None), edit.parts.get(f"{name}.{key}")
            if stored is not None and parts is not None:
                stored = selected(torch.empty_like(stored, device="meta"), parts)
            same = same and (tensor is None or (stored is not None and stored.shape == tensor.shape))
        if not same:
            yield path


def _tables(decoder: Decoder, new: nn.Module, kept: tuple[int, ...]) -> Iterator[tuple[str, Stacked, Sequence[int]]]:
    """The tables outside the layers that hold a block for every layer, by name, and the blocks that stay."""
    after = dict(new.named_parameters())
    for name, old in decoder.model.named_parameters():
        if decoder.structure.layer_of(name) is None and name in after and after[name].shape != old.shape:
            axis = next(i for i, size in enumerate(old.shape) if after[name].shape[i] != size)
            yield name, Stacked(name, axis, decoder.structure.num_layers), kept


def _channels(plan: PruningPlan, width: Width) -> list[tuple[Unit, torch.Tensor]]:
    """Each unit that loses channels by `plan`, with those that stay."""
    return [
        (unit, channels)
        for layer, here in zip(plan.kept, plan.gone.kept_channels, strict=True)
        for unit, channels in zip(width.units[layer], here, strict=True)
        if unit is not None and channels is not None
    ]


@torch.no_grad()
def filled(edit: Edit, decoder: Decoder, *, shared: bool = False) -> Decoder:
    """The model of `edit` with the tensors of `decoder`, whose memory its parameters share if `shared`.

    Tensors keep their dtype, device and ties, and modules their mode and place.
    """
    model, made, taken = decoder.model, edit.made.model, dict[int, Any]()
    for path, module in made.named_modules():
        name = edit.modules[path]
        old: Any = model.get_submodule(name)
        for slots in (module._parameters, module._buffers):
            for key in [key for key, slot in slots.items() if slot is not None]:
                stored: Any
                stored, new = getattr(old, key, None), edit.new.get(f"{path}.{key}")
                if new is not None:
                    slots[key] = nn.Parameter(new, getattr(stored, "requires_grad", True))
                    continue
                if id(stored) not in taken:
                    taken[id(stored)] = _copied(stored, edit.parts.get(f"{name}.{key}"), shared=shared)
                slots[key] = taken[id(stored)]
        for learnt in _LEARNT:
            if hasattr(old, learnt):
                setattr(module, learnt, getattr(old, learnt))
        place_alike(old, module)
    if places := vars(model).get("hf_device_map"):
        vars(made)["hf_device_map"] = {new: places[name] for new, name in edit.modules.items() if name in places}
    take_over(model, made)
    if len(edit.kept) < decoder.structure.num_layers and decoder.family.changes(decoder.structure.config):
        decoder.family.fold(edit.made.layers, edit.kept)
    return edit.made


def _copied(stored: torch.Tensor, parts: Parts | None, *, shared: bool) -> torch.Tensor:
    tensor = stored.detach()
    if parts is not None:
        tensor = selected(tensor, parts)
    elif not (shared and isinstance(stored, nn.Parameter)):
        tensor = tensor.clone()
    return nn.Parameter(tensor, stored.requires_grad) if isinstance(stored, nn.Parameter) else tensor


def _wrong(model: PreTrainedModel) -> str:
    return f"these parts of {type(model).__name__} cannot be removed correctly"
