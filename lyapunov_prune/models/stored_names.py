"""Which tensor of a model each tensor of its checkpoint's files fills, as transformers' loader assigns them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from lyapunov_prune.models.packed import DENSE, unpacker


@dataclass(frozen=True)
class Target:
    """The tensor of the model that is filled, and the conversion on the way; None if it only renames."""

    name: str
    converter: WeightConverter | None = None
    pattern: str = ""


def targets_of(model: PreTrainedModel, keys: Iterable[str]) -> tuple[dict[str, Target], dict[str, str]]:
    """The target of each of `keys`, names of tensors in the files of `model`; and of those that have none, the new
    name that transformers' renaming gives them.

    As the loader does it: renamed, then converted by at most one rule, with or without the prefix of the base model.
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
