"""The tensor of a model that each tensor in its checkpoint's files fills, as transformers' loader assigns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.packed import DENSE, unpacker
from lyapunov_prune.models.structure import Structure


@dataclass(frozen=True)
class Target:
    """The tensor of the model that is filled, and the conversion applied on loading; None if it is only renamed."""

    name: str
    converter: WeightConverter | None = None
    pattern: str = ""


def targets_of(model: PreTrainedModel, keys: Iterable[str]) -> tuple[dict[str, Target], dict[str, str]]:
    """Map `keys`, names of tensors in the files of `model`, to their targets; and keys without a target to new names.

    Follows transformers' loader: a key is renamed, then converted by at most one rule, with or without the prefix of
    the base model. The new names of keys without a target are those after renaming.
    """
    rules = get_model_conversion_mapping(model, hf_quantizer=unpacker(model.config))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    targets: dict[str, Target] = {}
    others: dict[str, str] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            others[key] = name
        elif pattern is None or pattern == DENSE:
            targets[key] = Target(name)
        else:
            targets[key] = Target(name, by_pattern[pattern], pattern)
    return targets, others


def stored_path(structure: Structure, targets: Mapping[str, Target]) -> str:
    """The path in front of the layer number in the names of a checkpoint.

    Raises LyapunovPruneError if the names do not share one such path.
    """
    inside = f"{structure.layers_path}."
    paths: set[tuple[str, ...]] | None = None
    for key, target in targets.items():
        if target.name.startswith(inside):
            number = target.name.removeprefix(inside).partition(".")[0]
            parts = tuple(key.split("."))
            before = {parts[:place] for place, part in enumerate(parts) if part == number}
            paths = before if paths is None else paths & before
    if paths is None or len(paths) != 1:
        raise LyapunovPruneError(
            f"the checkpoint numbers the layers of {structure.model_type} in another way than the model; prune it in "
            "memory"
        )
    return ".".join(paths.pop())
