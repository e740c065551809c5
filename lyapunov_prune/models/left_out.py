"""What the files of a checkpoint hold and the model that was loaded from them does not.

transformers drops what no module of a class takes, much of it without a word (`_keys_to_ignore_on_load_unexpected`): a
vision tower where the text model alone is loaded, heads that predict more tokens, tables that are computed anew.
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
from lyapunov_prune.models.classifiers import looks_at_images
from lyapunov_prune.models.structure import find_layers
from lyapunov_prune.progress import warn

_NOTE = "_lyapunov_prune_left_out"  # a plain attribute of the model: a deep copy has it, save_pretrained does not
_NAMED = 3  # groups of tensors that a line names
# A module of prediction heads, by any name that families give it: `mtp`, `mtp_layers`, `nextn`.
_HEADS = re.compile(r"(^|\.)[^.]*(mtp|nextn)[^.]*(\.|$)")
_COUNTED = re.compile(r"mtp|nextn|n_predict")
_NUMBER = re.compile(r"num|layers$|modules$|depth$|n_predict$")
_TABLES = ("inv_freq", "position_ids", "masked_bias")  # which older versions of transformers stored
# What a line calls a tensor by: its layer, or the module that holds its module.
_GROUP = re.compile(r"(model\.)?(language_model\.(model\.)?)?layers\.\d+|(model\.)?[^.]+")


@dataclass(frozen=True)
class LeftOut:
    """Tensors that no module of the loaded model took, by their names in the files.

    `taken` are all others, with the tensor of the model that each fills.

    `heads` predict more tokens than the next; `parts` are of modules outside the layers that the model's class does not
    have, as a vision tower; `strays` are weights of layers that the config does not name or lacks in them; `tables` are
    what modules of the model compute anew.
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
        """A line for each kind that is there, with names and numbers."""
        said = []
        if self.parts:
            why = "as asked" if self.asked else "this model has no place for them"
            said.append(f"{_grouped(self.parts)}, left out: {why}")
        if self.heads:
            said.append(
                f"{_grouped(self.heads)}, left out: prediction heads for more tokens, of which the config that is "
                "written counts 0"
            )
        if self.strays:
            said.append(f"{_grouped(self.strays)}, left out: the config names no such weights")
        if self.tables:
            said.append(f"{_grouped(self.tables)}, left out: computed anew on loading")
        return said


def find_left_out(
    model: PreTrainedModel, taken: Mapping[str, str], others: Mapping[str, str], *, asked: bool = False
) -> LeftOut:
    """`others` by kind: the tensors of the files that `model` does not take, with the names they would have in it."""
    if not others:
        return LeftOut(taken, asked=asked)
    path = find_layers(model).layers_path
    count, modules = len(model.get_submodule(path)), {name for name, _ in model.named_modules()}  # type: ignore[arg-type]
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
    """Let `model` know what it was loaded without, and say it, but for tables."""
    setattr(model, _NOTE, left)
    for line in LeftOut({}, left.heads, left.parts, left.strays, asked=left.asked).lines():
        warn(f"{where} holds {line}")


def left_out(model: PreTrainedModel) -> LeftOut | None:
    """What `model` was loaded without; None for one that `load` has not read from files."""
    return vars(model).get(_NOTE)


def copy_left_out(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let `model`, made of `source` in another class or place, know what that was loaded without."""
    setattr(model, _NOTE, left_out(source))


def require_whole(model: PreTrainedModel) -> None:
    """Raise LyapunovPruneError for a model whose checkpoint holds parts that would be lost without anybody asking.

    Of an image classifier they are another task's.
    """
    left = left_out(model)
    if left is not None and left.parts and not left.asked and not looks_at_images(model):
        raise LyapunovPruneError(
            f"what is written would lack {_grouped(left.parts)}, which {type(model).__name__} has no place for; leave "
            "them out first, by export --text-only"
        )


def without_heads(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, with every count of prediction heads 0, in the configs inside it too."""
    return {key: _without(key, value) for key, value in settings.items()}


def forget_heads(config: PreTrainedConfig) -> None:
    """`without_heads` of a config in memory and of those inside it, in place."""
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
    """How many prediction heads behind the last layer a config counts."""
    settings = config.get_text_config(decoder=True).to_dict()
    return max((v for k, v in settings.items() if _COUNTED.search(k) and _is_count(k, v)), default=0)


def _layer(name: str, path: str) -> int | None:
    number = name.removeprefix(f"{path}.").partition(".")[0]
    return int(number) if name.startswith(f"{path}.") and number.isdecimal() else None


def _grouped(keys: Sequence[str]) -> str:
    """`156 tensors (153 of model.visual, 3 of mtp)`, the largest groups first."""
    groups = Counter(_group(key) for key in keys)
    named = [f"{count} of {group}" for group, count in groups.most_common(_NAMED)]
    more = [f"{len(groups) - _NAMED} other groups"] if len(groups) > _NAMED else []
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)} ({', '.join([*named, *more])})"


def _group(key: str) -> str:
    match = _GROUP.match(key)
    return match[0] if match else key
