"""The cut: a new model without the layers, sublayers, channels and experts that a plan names. `gate` checks it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.masking import masked, masked_experts
from lyapunov_prune.mending.mend import Mend, mapped, store_mend
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.models.adaptations import Cut
from lyapunov_prune.models.compact import renumber_compact
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.dispatched import is_dispatched
from lyapunov_prune.models.families import DEPTH_ATTRIBUTES, POSITION_ATTRIBUTES
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.left_out import forget_heads
from lyapunov_prune.models.mixtures import drop_experts
from lyapunov_prune.models.settings import lost_attention, slice_settings
from lyapunov_prune.models.sharing import own, share_equal, shared_memo
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.models.units import Refits
from lyapunov_prune.models.width import find_width, narrow
from lyapunov_prune.models.wrappers import require_levels_stay, require_text_alone
from lyapunov_prune.progress import warn
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.history import add_step


@dataclass(frozen=True, eq=False)
class Operation:
    """`plan`, one merged block for every activation that it drops, and the maps that close its gaps.

    `refits` are last matrices refitted to the kept channels, in the model's dtype, by the index of the kept layer and
    of the unit in it (`models.units.find_units`).

    Raises LyapunovPruneError unless `merged` are the blocks whose activation the plan drops.
    """

    plan: PruningPlan
    merged: Sequence[Merged] = ()
    mends: Sequence[Mend] = ()
    refits: Refits = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = tuple(sorted(each.block.layer for each in self.merged))
        if given != self.plan.drop_activation:
            raise LyapunovPruneError(
                f"the plan drops the activations of layers {list(self.plan.drop_activation)}, but merged blocks are "
                f"given for {list(given)}; a reduction is fitted on a text: write the plan with export.write_pruned "
                "and a batch"
            )

    def place(self, layer: int) -> int:
        """The index of the kept `layer` in the new model."""
        return self.plan.kept.index(layer)

    @property
    def computes(self) -> bool:
        """Whether the new model computes some products with matrices that are new or smaller, so rounding differs."""
        return bool(self.mends or self.plan.channels or self.plan.experts_gone)

    @contextmanager
    def standing_in(self, decoder: Decoder) -> Iterator[None]:
        """Within the block, `decoder` computes by hooks what the model made from it should compute.

        Parts aside that only a compact model can lack (`export.compact_gate.cut_by_hooks`).
        """
        skipping = skipped(decoder.structure, self.plan.remove)
        kept = dict(zip(self.plan.kept, self.plan.kept_channels, strict=False))  # no channels if the plan has none
        narrower = masked(decoder, kept, self.refits)
        fewer = masked_experts(decoder, self.plan.experts_gone)
        with mapped(decoder.layers, self.mends), fewer, skipping, narrower:
            yield


def cut(decoder: Decoder, operation: Operation, *, shared: bool = False) -> Decoder:
    """`without_parts` for the plan of `operation`; the layers before gaps absorb their maps. It is not checked yet."""
    pruned = without_parts(decoder, operation.plan, operation.refits, shared=shared)
    for index in {mend.place.layer for mend in operation.mends}:
        own(pruned.layers[operation.place(index)])
    for mend in operation.mends:
        store_mend(pruned.layers[operation.place(mend.place.layer)], mend)
    return pruned


def without_parts(
    decoder: Decoder, plan: PruningPlan, refits: Refits = MappingProxyType({}), *, shared: bool = False
) -> Decoder:
    """Make a new model without the parts that `plan` removes; it is not checked yet. `decoder` is untouched.

    One rule serves every decoder: drop the layers, renumber every nested `layer_idx` (caches are indexed by it), slice
    everything in the config that describes single layers (some models read it while they run), and set the layer
    count. `models/families.py` holds what a family needs beyond that. Removed layers are not copied. Hidden
    channels leave the matrices of blocks and experts (`models/width.py`), whose last ones become the `refits`
    (`Operation`). Experts leave with their rows of the router (`models/mixtures.py`). With `shared`, unchanged tensors
    share the memory of `decoder`; use it for a result that is only read and saved, because a later in-place change
    would affect both.

    `decoder` holds its plain weights (`models.plain`). Raises LyapunovPruneError for parts of layers that only a
    compact checkpoint can lack, experts that cannot be removed (`Mixtures.require`), a removal that the family's
    checkpoint format cannot express, and a decoder inside a multimodal model that text alone cannot judge.
    """
    plan.require_plain()
    if plan.experts_gone:
        decoder.mixtures.require(plan.experts, plan.remove)
    with held(decoder.model):  # hooks of a running measurement would be copied too
        if decoder.wrapped:
            require_text_alone(decoder, plan.remove)
        memo = shared_memo(decoder.model) if shared else {}
        pruned = without_layers(decoder, plan, memo)
    if plan.channels:
        width = find_width(decoder).of_layers(plan.kept, decoder.structure)
        narrow(pruned, width, plan.kept_channels)
        with torch.no_grad():
            for (layer, index), weight in refits.items():
                unit = width.units[layer][index]
                assert unit is not None
                unit.out.weight(pruned.model).copy_(weight)
    if gone := {plan.kept.index(layer): experts for layer, experts in plan.experts_gone.items()}:
        drop_experts(pruned.model, pruned.structure, decoder.mixtures.of_layers(plan.kept), gone)
    add_step(pruned.model, "prune", plan.measured_on, decoder.model)
    return pruned


def share_memory(pruned: PreTrainedModel, original: Decoder, plan: PruningPlan) -> None:
    """Let the unchanged tensors of `pruned` share the memory of `original` (`models.sharing.share_equal`)."""
    named = original.model.named_parameters(remove_duplicate=False)
    twins = ((original.structure.renamed(name, plan.kept), parameter) for name, parameter in named)
    share_equal(pruned, {name: parameter for name, parameter in twins if name is not None})


def without_layers(decoder: Decoder, plan: PruningPlan, memo: Mapping[int, Any] = MappingProxyType({})) -> Decoder:
    """A copy of the model, whose weights may be on the meta device, without the layers of `plan`; its sublayers stay.

    `memo` maps objects to their replacements in the copy, as in `copy.deepcopy`.

    Raises LyapunovPruneError if the family's checkpoint format cannot express the remaining layers.
    """
    original, family = decoder.structure, decoder.family
    # deepcopy uses the memo's entry instead of a copy, so removed layers are never copied.
    memo = {**memo, **{id(original.layers[i]): nn.Identity() for i in plan.remove}}
    pruned, structure = copy.deepcopy((decoder.model, original), memo)
    if not plan.remove:
        return Decoder(pruned, structure)
    layers, config = structure.layers, structure.config
    for index in reversed(plan.remove):
        del layers[index]

    forget_heads(pruned.config)
    gone: set[str] = set()
    for each in _configs(pruned, config, original):
        gone.update(slice_settings(each, original.count, plan.kept, original.num_layers))
    if gone:
        warn(
            f"{', '.join(sorted(gone))} in the config names layers by the numbers of the original, which is unknown "
            "here: left out of the config of the pruned model"
        )
    _renumber(pruned, layers, plan.kept, original.num_layers)
    _renumber_devices(pruned, original, plan.kept)
    renumber_compact(pruned, layers)
    _slice_tables(pruned, family.tables, plan.kept, original.num_layers)
    why = family.adapt(Cut(pruned, layers, config, original.config, plan.kept))
    if why := why or lost_attention(original.config, config):  # after `adapt`, which may say where attentions are
        raise LyapunovPruneError(why)
    _rename_ties(pruned)
    return Decoder(pruned, structure)


def refusal(decoder: Decoder, remove: Sequence[int]) -> str | None:
    """Why no checkpoint can hold `decoder` without the layers `remove`; None if one can.

    The layers are cut from a copy that shares the weights of `decoder`, and whose tables outside the layers are empty.
    Packed weights, and those on several devices, are not judged: None.
    """
    model = decoder.model
    if decoder.packed or is_dispatched(model):
        return None
    names = {suffix for suffix, _ in decoder.family.tables}
    tables = [module for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    empty = {id(table.weight): nn.Parameter(table.weight.to("meta")) for table in tables}
    try:
        with held(model), quiet():
            if decoder.wrapped:
                require_levels_stay(model, tuple(remove))
            without_layers(decoder, PruningPlan.given(decoder, remove), {**shared_memo(model), **empty})
    except LyapunovPruneError as error:
        return str(error)
    return None


def _renumber(pruned: PreTrainedModel, layers: nn.ModuleList, kept: tuple[int, ...], total: int) -> None:
    done: set[int] = set()  # a module that layers share must be renumbered once
    for new, old in enumerate(kept):
        for module in layers[new].modules():
            if id(module) in done:
                continue
            done.add(id(module))
            for name in POSITION_ATTRIBUTES:
                if getattr(module, name, None) == old:
                    setattr(module, name, new)
            for name in DEPTH_ATTRIBUTES:
                if getattr(module, name, None) == total:
                    setattr(module, name, len(kept))


def _rename_ties(pruned: PreTrainedModel) -> None:
    """Renew the names of weights that are tied between layers: the copy has the old layer numbers."""
    tied = {name: module for name, module in pruned.named_modules() if "_tied_weights_keys" in vars(module)}
    if not tied:
        return
    kind: Any = type(pruned)
    what = f"these layers of {kind.__name__} cannot be removed correctly: the model cannot be built without them"
    with reported(what, "remove other layers", Exception), torch.device("meta"):
        fresh = kind(copy.deepcopy(pruned.config))
    for name, module in tied.items():
        module._tied_weights_keys = fresh.get_submodule(name)._tied_weights_keys
    pruned.all_tied_weights_keys = fresh.all_tied_weights_keys


def _renumber_devices(pruned: PreTrainedModel, original: Structure, kept: tuple[int, ...]) -> None:
    """Renumber the layers in accelerate's map from modules to devices."""
    before: dict[str, Any] | None = vars(pruned).get("hf_device_map")
    if before is not None:
        places = ((original.renamed(name, kept), device) for name, device in before.items())
        vars(pruned)["hf_device_map"] = {name: device for name, device in places if name is not None}


@torch.no_grad()
def _slice_tables(
    pruned: PreTrainedModel, tables: tuple[tuple[str, int], ...], kept: tuple[int, ...], total: int
) -> None:
    """Cut the blocks of removed layers out of parameters outside the layers."""
    for suffix, axis in tables:
        for path, module in list(pruned.named_modules()):
            if path.rpartition(".")[2] != suffix:
                continue
            weight: Any = module.weight
            blocks = weight.detach().chunk(total, dim=axis)
            module.weight = nn.Parameter(torch.cat([blocks[i] for i in kept], dim=axis), weight.requires_grad)
            size = "embedding_dim" if isinstance(module, nn.Embedding) else ("out_features", "in_features")[axis]
            setattr(module, size, module.weight.shape[axis])


def _configs(model: PreTrainedModel, text: Any, original: Structure) -> list[Any]:
    """`text`, and every other text config that the model's modules hold; usually one object is shared by all."""
    configs = {id(text): text}
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is type(text) and getattr(config, original.count, None) == original.num_layers:
            configs[id(config)] = config
    return list(configs.values())
