"""Tensors in a checkpoint's files that the model loaded from them does not hold.

transformers drops what no module of the class takes, often silently (`_keys_to_ignore_on_load_unexpected`): a vision
tower if only the text model is loaded, heads that predict more tokens, tables that are recomputed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.progress import warn

_NOTE = "_lyapunov_prune_left_out"  # a plain attribute of the model: deep copies have it, save_pretrained drops it
_NAMED = 3  # groups of tensors named in a line
# Modules of prediction heads, by the names that families use: `mtp`, `mtp_layers`, `nextn`.
_HEADS = re.compile(r"(^|\.)[^.]*(mtp|nextn)[^.]*(\.|$)")
_COUNTED = re.compile(r"mtp|nextn|n_predict")
_NUMBER = re.compile(r"num|layers$|modules$|depth$|n_predict$")
_TABLES = ("inv_freq", "position_ids", "masked_bias")  # stored by older versions of transformers
# The group of a tensor in a line: its layer, or the outermost module.
_GROUP = re.compile(r"(model\.)?(language_model\.(model\.)?)?layers\.\d+|(model\.)?[^.]+")


@dataclass(frozen=True)
class LeftOut:
    """Tensors that no module of the loaded model takes, by their names in the files.

    `taken` maps all other tensors to those of the model that they fill.

    `heads` predict more tokens than the next; `parts` belong to modules outside the layers that the model's class
    lacks, such as a vision tower; `strays` are weights that the config does not name; `tables` are recomputed by the
    model.
    """

    taken: Mapping[str, str]
    heads: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    asked: bool = False  # whether the parts were left out on request

    @property
    def names(self) -> tuple[str, ...]:
        return self.heads + self.parts + self.strays + self.tables

    def lines(self) -> list[str]:
        """One line for each kind present, with names and numbers."""
        kinds = (
            (self.parts, "as asked" if self.asked else "this model has no place for them"),
            (self.heads, "prediction heads for more tokens, of which the config that is written counts 0"),
            (self.strays, "the config names no such weights"),
            (self.tables, "computed anew on loading"),
        )
        return [f"{_grouped(keys)}, left out: {why}" for keys, why in kinds if keys]


def find_left_out(
    model: PreTrainedModel,
    structure: Structure,
    taken: Mapping[str, str],
    others: Mapping[str, str],
    *,
    asked: bool = False,
) -> LeftOut:
    """Sort by kind `others`: tensors in the files that `model` does not take, with their names in it."""
    if not others:
        return LeftOut(taken, asked=asked)
    path, count = structure.layers_path, structure.num_layers
    modules = {name for name, _ in model.named_modules()}
    extra = _counted(model.config)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    kinds: dict[str, list[str]] = {"heads": [], "parts": [], "strays": [], "tables": []}
    for key, name in others.items():
        places = (name, f"{model.base_model_prefix}.{name}")
        layer = next((int(n) for n in (_layer(place, path) for place in places) if n is not None), None)
        if _HEADS.search(name) or (layer is not None and count <= layer < count + extra):
            kind = "heads"
        elif layer is None and not any(place.rpartition(".")[0] in modules for place in places):
            kind = "parts"
        elif any(pattern.search(key) for pattern in ignored) or key.endswith(_TABLES):
            kind = "tables"
        else:
            kind = "strays"
        kinds[kind].append(key)
    return LeftOut(taken, **{kind: tuple(keys) for kind, keys in kinds.items()}, asked=asked)


def keep_left_out(model: PreTrainedModel, left: LeftOut, where: Path) -> None:
    """Store on `model` what it was loaded without, and warn of it, except for tables."""
    setattr(model, _NOTE, left)
    for line in LeftOut({}, left.heads, left.parts, left.strays, asked=left.asked).lines():
        warn(f"{where} holds {line}")


def left_out(model: PreTrainedModel) -> LeftOut | None:
    """What `model` was loaded without; None if `load` did not read it from files."""
    return vars(model).get(_NOTE)


def copy_left_out(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy to `model`, which was made from `source`, what that was loaded without."""
    setattr(model, _NOTE, left_out(source))


def require_whole(model: PreTrainedModel) -> None:
    """Raise LyapunovPruneError if parts of the model's checkpoint would be lost without being asked for."""
    left = left_out(model)
    if left is not None and left.parts and not left.asked:
        raise LyapunovPruneError(
            f"the written model would lack {_grouped(left.parts)}, for which {type(model).__name__} has no place; "
            "leave them out first, by export --text-only"
        )


def without_heads(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with every count of prediction heads set to 0, in nested configs too."""
    return {key: _without(key, value) for key, value in settings.items()}


def forget_heads(config: PreTrainedConfig) -> None:
    """`without_heads` for a config in memory and its nested configs, in place."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if isinstance(part, PreTrainedConfig):
            for name, value in without_heads({k: v for k, v in vars(part).items() if _COUNTED.search(k)}).items():
                setattr(part, name, value)


def _without(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        inner = without_heads(value)
        return {k: 0 if _COUNTED.search(key) and _is_count(k, v) else v for k, v in inner.items()}
    if not _COUNTED.search(key):
        return value
    if value is True and key.startswith(("use_", "enable_")):
        return False
    return 0 if _is_count(key, value) else value


def _is_count(key: str, value: Any) -> bool:
    return type(value) is int and _NUMBER.search(key) is not None


def _counted(config: Any) -> int:
    """Number of prediction heads behind the last layer, according to the config."""
    settings = config.get_text_config(decoder=True).to_dict()
    return max((v for k, v in settings.items() if _COUNTED.search(k) and _is_count(k, v)), default=0)


def _layer(name: str, path: str) -> int | None:
    number = name.removeprefix(f"{path}.").partition(".")[0]
    return int(number) if name.startswith(f"{path}.") and number.isdecimal() else None


def _grouped(keys: Sequence[str]) -> str:
    """The tensors in words, `156 tensors (153 of model.visual, 3 of mtp)`, largest groups first."""
    groups = Counter(match[0] if (match := _GROUP.match(key)) else key for key in keys)
    named = [f"{count} of {group}" for group, count in groups.most_common(_NAMED)]
    more = [f"{len(groups) - _NAMED} other groups"] if len(groups) > _NAMED else []
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)} ({', '.join([*named, *more])})"
