"""The cut: a new model without the layers and sublayers that a plan names. It proves nothing: `gate.py` does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, in_short
from lyapunov_prune.mending.mend import Mend, store_mend
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.models.adaptations import Cut
from lyapunov_prune.models.compact import renumber_compact
from lyapunov_prune.models.families import DEPTH_ATTRIBUTES, POSITION_ATTRIBUTES, family_entry
from lyapunov_prune.models.held import held
from lyapunov_prune.models.layer_settings import require_attention, slice_settings
from lyapunov_prune.models.left_out import forget_heads
from lyapunov_prune.models.plain import plain
from lyapunov_prune.models.sharing import own, share_equal, shared_memo
from lyapunov_prune.models.structure import Structure, find_structure
from lyapunov_prune.models.wrappers import is_wrapped, require_text_alone
from lyapunov_prune.progress import warn
from lyapunov_prune.pruning.mirroring import mirror, require_mirrored
from lyapunov_prune.pruning.plan import PruningPlan, as_plan
from lyapunov_prune.pruning.zeroing import zero_sublayers
from lyapunov_prune.results.history import add_step


def cut(
    model: PreTrainedModel,
    plan: PruningPlan | Sequence[int],
    merged: Sequence[Merged] = (),
    mends: Sequence[Mend] = (),
    *,
    shared: bool = False,
) -> PreTrainedModel:
    """A new model without what `plan` (or a plain list of layers) names, not yet proven right; `model` is untouched.

    One rule for every decoder: drop the layers, renumber every nested `layer_idx` (caches are indexed by
    it), slice everything in the config that speaks of single layers (some models read it while they
    run), set the layer count. What a family needs beyond it stands in `models/families.py`. Removed
    layers are not copied. Where the plan drops a sublayer alone, its output projection becomes zero
    (`zeroing.py`), and where it drops an activation, the block computes what `merged` says of its layer
    (`mirroring.py`): a plain checkpoint can say no more, and that saves no time or memory. The layers before gaps take
    the maps of `mends` into their parameters. `shared`, what stays as it was lies where that of `model` does: for a
    result that is only looked at and saved, since a later change of one in place would be one of both.

    Raises LyapunovPruneError for a bad plan, a plan for another model, `merged` of other layers than the plan's, a
    block that cannot hold a merged matrix, a removal that the family's checkpoint format cannot express, a decoder
    inside a multimodal model that text alone cannot judge, and a model that is not its plain weights (adapters,
    quantised or parametrised weights).
    """
    plain(model)
    plan = as_plan(model, plan)
    require_merged(plan, merged)
    structure = find_structure(model)
    require_mirrored(structure, plan.drop_activation)
    with held(model):  # what a measurement has put on it would be copied too
        if is_wrapped(model):
            require_text_alone(model, structure, plan.remove)
        memo = shared_memo(model) if shared else {}
        pruned = without_layers(model, structure, plan, memo) if plan.remove else copy.deepcopy(model, memo)
    attention, mlp = (tuple(plan.kept.index(i) for i in drop) for drop in (plan.drop_attention, plan.drop_mlp))
    layers = find_structure(pruned).layers
    changed = {*plan.drop_attention, *plan.drop_mlp, *plan.drop_activation, *(mend.place.layer for mend in mends)}
    for index in sorted(changed):
        own(layers[plan.kept.index(index)])
    zero_sublayers(pruned, attention, mlp)
    for each in merged:
        mirror(layers[plan.kept.index(each.block.layer)], each)
    for mend in mends:
        store_mend(layers[plan.kept.index(mend.place.layer)], mend)
    add_step(pruned, "prune", plan.measured_on, model)
    return pruned


def share_memory(pruned: PreTrainedModel, original: PreTrainedModel, plan: PruningPlan) -> None:
    """Let what `pruned` keeps of `original` as it was lie where that does (`models.sharing.share_equal`)."""
    path, kept = find_structure(original).layers_path, {old: new for new, old in enumerate(plan.kept)}
    twins = {}
    for name, parameter in original.named_parameters(remove_duplicate=False):
        layer, dot, rest = name.removeprefix(f"{path}.").partition(".")
        if not name.startswith(f"{path}."):
            twins[name] = parameter
        elif int(layer) in kept:
            twins[f"{path}.{kept[int(layer)]}{dot}{rest}"] = parameter
    share_equal(pruned, twins)


def require_merged(plan: PruningPlan, merged: Sequence[Merged]) -> None:
    """Raise LyapunovPruneError unless `merged` are the blocks whose activation the plan drops."""
    given = tuple(sorted(each.block.layer for each in merged))
    if given != plan.drop_activation:
        raise LyapunovPruneError(
            f"the plan drops the activations of layers {list(plan.drop_activation)}, and merged blocks are given of "
            f"{list(given)}; a reduction is fitted on a text: write the plan with pruning.write_pruned and a batch"
        )


def without_layers(
    model: PreTrainedModel, original: Structure, plan: PruningPlan, memo: Mapping[int, Any] = MappingProxyType({})
) -> PreTrainedModel:
    """A copy of `model`, whose weights may be on the meta device, without the layers of `plan`; its sublayers stay.

    `memo` says what stands for what in the copy, as that of `copy.deepcopy`.

    Raises LyapunovPruneError when the family's checkpoint format cannot express what is left.
    """
    # An entry in the memo stands for the copy: removed layers are replaced, never copied.
    pruned = copy.deepcopy(model, {**memo, **{id(original.layers[i]): nn.Identity() for i in plan.remove}})
    layers = pruned.get_submodule(original.layers_path)
    assert isinstance(layers, nn.ModuleList)
    for index in reversed(plan.remove):
        del layers[index]

    forget_heads(pruned.config)
    gone: set[str] = set()
    for config in _configs(pruned, original):
        gone.update(slice_settings(config, original.count, plan.kept, original.num_layers))
    if gone:
        warn(
            f"{', '.join(sorted(gone))} in the config names layers by the numbers of the original, which nothing here "
            "understands: left out of the config of the pruned model"
        )
    _renumber(pruned, layers, plan.kept, original.num_layers)
    renumber_compact(pruned, layers)
    family = family_entry(original.model_type)
    _slice_tables(pruned, family.tables, plan.kept, original.num_layers)
    if family.adapt is not None:
        config = pruned.config.get_text_config(decoder=True)
        family.adapt(Cut(pruned, layers, config, original.config, plan.kept))
    require_attention(original.config, pruned.config.get_text_config(decoder=True))
    _rename_ties(pruned)
    _renumber_devices(pruned, original.layers_path, plan)
    return pruned


def _renumber(pruned: PreTrainedModel, layers: nn.ModuleList, kept: tuple[int, ...], total: int) -> None:
    done: set[int] = set()  # layers may share a module, which must not be renumbered twice
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
    """Where a model ties layers to each other, it keeps their old numbers; a fresh one knows the new."""
    tied = {name: module for name, module in pruned.named_modules() if "_tied_weights_keys" in vars(module)}
    if not tied:
        return
    try:
        with torch.device("meta"):
            fresh = type(pruned)(copy.deepcopy(pruned.config))
    except Exception as error:  # the family's own code says what it cannot build, in its own way
        raise LyapunovPruneError(
            f"these layers of {type(pruned).__name__} cannot be removed correctly: without them no such model can be "
            f"built ({in_short(error, 100)}); remove other layers"
        ) from None
    for name, module in tied.items():
        module._tied_weights_keys = fresh.get_submodule(name)._tied_weights_keys
    pruned.all_tied_weights_keys = fresh.all_tied_weights_keys


def _renumber_devices(pruned: PreTrainedModel, path: str, plan: PruningPlan) -> None:
    """accelerate's note of which module lies on which device names layers by number."""
    before: dict[str, Any] | None = vars(pruned).get("hf_device_map")
    if before is None:
        return
    places: dict[str, Any] = {}
    for name, device in before.items():
        index, dot, rest = name.removeprefix(f"{path}.").partition(".")
        if name.startswith(f"{path}.") and int(index) in plan.remove:
            continue
        if name.startswith(f"{path}."):
            name = f"{path}.{plan.kept.index(int(index))}{dot}{rest}"
        places[name] = device
    vars(pruned)["hf_device_map"] = places


@torch.no_grad()
def _slice_tables(
    pruned: PreTrainedModel, tables: tuple[tuple[str, int], ...], kept: tuple[int, ...], total: int
) -> None:
    """Cut the blocks of removed layers out of parameters that lie outside the layers."""
    for suffix, axis in tables:
        for path, module in list(pruned.named_modules()):
            if path.rpartition(".")[2] != suffix:
                continue
            weight: Any = module.weight
            blocks = weight.detach().chunk(total, dim=axis)
            module.weight = nn.Parameter(torch.cat([blocks[i] for i in kept], dim=axis), weight.requires_grad)
            size = "embedding_dim" if isinstance(module, nn.Embedding) else ("out_features", "in_features")[axis]
            setattr(module, size, module.weight.shape[axis])


def _configs(model: PreTrainedModel, original: Structure) -> list[Any]:
    """Every distinct text config the model's modules hold; usually one object, shared by all."""
    text: Any = model.config.get_text_config(decoder=True)
    configs = {id(text): text}
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is type(text) and getattr(config, original.count, None) == original.num_layers:
            configs[id(config)] = config
    return list(configs.values())
