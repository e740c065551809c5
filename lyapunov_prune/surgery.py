"""Physical layer removal in memory: a new model without the layers a plan names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.gate import verify_removal
from lyapunov_prune.models.families import FAMILIES, POSITION_ATTRIBUTES
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.plan import PruningPlan, as_plan


def remove_layers(model: PreTrainedModel, plan: PruningPlan | Sequence[int]) -> PreTrainedModel:
    """A new model without the layers of `plan` (or a plain list of indices); `model` is untouched.

    One rule for every decoder: drop the layers, renumber every nested `layer_idx` (caches are indexed by
    it), slice every per-layer list of the config (some models read it while they run), set the layer
    count. What a family needs beyond it stands in `models/families.py`. Removed layers are not copied.

    The result saves with `save_pretrained` and loads with plain transformers. A decoder without an entry
    in the family table is put through the gate on random tokens first (`verify_removal` is the full
    gate, with your text). Raises LyapunovPruneError for a bad plan, a plan for another model, or a
    decoder that fails.
    """
    plan = as_plan(model, plan)
    pruned = _without(model, plan)
    if find_structure(model).model_type not in FAMILIES:
        report = verify_removal(model, pruned, plan)
        if not report.passed:
            raise LyapunovPruneError(
                f"layers of {type(model).__name__} cannot be removed correctly yet: {report.failure()}"
            )
    return pruned


def _without(model: PreTrainedModel, plan: PruningPlan) -> PreTrainedModel:
    original = find_structure(model)
    # An entry in the memo stands for the copy: removed layers are replaced, never copied.
    memo: dict[int, Any] = {id(original.layers[i]): nn.Identity() for i in plan.remove}
    pruned = copy.deepcopy(model, memo)
    layers = pruned.get_submodule(original.layers_path)
    assert isinstance(layers, nn.ModuleList)
    for index in reversed(plan.remove):
        del layers[index]

    for config in _configs(pruned, original.num_layers):
        slice_config(config, plan)
    config = pruned.config.get_text_config(decoder=True)
    family = FAMILIES.get(original.model_type)
    for new, old in enumerate(plan.kept):
        for module in layers[new].modules():
            for name in POSITION_ATTRIBUTES:
                if getattr(module, name, None) == old:
                    setattr(module, name, new)
        if family is not None and family.renumber is not None:
            family.renumber(layers[new], old, new, config)
    return pruned


def slice_config(config: Any, plan: PruningPlan) -> None:
    """Set the layer count of a text config and slice its per-layer lists, in place.

    A per-layer list is one with `layer` in its name and one entry a layer.
    """
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list | tuple) and len(value) == plan.model.num_layers:
            setattr(config, name, type(value)(value[i] for i in plan.kept))
    config.num_hidden_layers = len(plan.kept)


def _configs(model: PreTrainedModel, layers: int) -> list[Any]:
    """Every distinct text config the model's modules hold; usually one object, shared by all."""
    text: Any = model.config.get_text_config(decoder=True)
    found = {id(text): text}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "num_hidden_layers", None) == layers:
            found[id(config)] = config
    return list(found.values())
