"""The settings of a config that affect the forward, and those that transformers does not read."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from lyapunov_prune.models.quantised import is_packed
from lyapunov_prune.results.encoding import encode

# Settings that change no forward in eval mode: bookkeeping, optional outputs, initialisation and training, labels, and
# tokens that only a tokenizer or `generate` uses. All others count.
_NO_EFFECT = re.compile(
    r"_.*|architectures|auto_map|transformers_version|transformers_weights|(torch_)?dtype|torchscript|tokenizer_class"
    r"|(attn|experts)_implementation|use_cache|chunk_size_feed_forward|gradient_checkpointing|pretraining_tp"
    r"|return_dict|output_\w+|initializer_\w+|init_std|\w*(dropout|pdrop|layerdrop|drop_path)\w*|\w*loss\w*"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params"
    r"|(bos|eos|sep|cls|mask|unk|decoder_start|forced_\w+)_token_id"
)

# Shared code of transformers, which may read settings that no config class declares.
_SHARED_CODE = (
    "cache_utils.py",
    "configuration_utils.py",
    "masking_utils.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
)
_OF_LAYERS = re.compile("layer|block|att|mlp|ffn|expert|drop|skip|prune|exit")
_NAMED_IN_CODE = re.compile(r"\b(?:config|self)\.(\w+)|[\"'](\w+)[\"']")


def forward_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of `model` that can change a forward, as JSON values; nested ones are named `inner.name`.

    They come from the parsed config, so it does not matter whether the file spells out a default.
    """
    without = {"quantization_config"} if not is_packed(model) else set()
    if not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        without.add("pad_token_id")  # otherwise positions are counted from it
    found = {prefix + name: value for prefix, name, value in _settings(model.config) if name not in without}
    return json.loads(json.dumps(encode(found), default=lambda value: type(value).__name__))


def _settings(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, value in config.to_dict().items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            yield from _settings(inner, f"{prefix}{name}.")
        elif not _NO_EFFECT.fullmatch(name):
            yield prefix, name, value


def unknown_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings that transformers does not read: not declared by `config`'s class, nor named in the family's code.

    Other programs and a checkpoint's own code may read them. Bookkeeping is left out.
    """
    kind = type(config)
    found = {
        name: value
        for name, value in vars(config).items()
        if not hasattr(kind, name) and name not in config.attribute_map and not _NO_EFFECT.fullmatch(name)
    }
    if not found:
        return {}
    family = None
    with suppress(OSError, TypeError):  # a class defined interactively has no file
        family = Path(inspect.getfile(kind)).parent
    named = _named_in_code(family)
    return {name: value for name, value in found.items() if name not in named}


@functools.cache
def _named_in_code(family: Path | None) -> frozenset[str]:
    """Every name in transformers' shared code and in the folder `family` that is read from a config or quoted."""
    files = [Path(transformers.__file__).parent / name for name in _SHARED_CODE]
    files += family.glob("*.py") if family else ()
    code = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return frozenset(name for names in _NAMED_IN_CODE.findall(code) for name in names)


def unknown_layer_numbers(config: PreTrainedConfig, total: int) -> list[str]:
    """The unknown settings that hold layer numbers below `total`, in a list or as keys.

    Other lists hold small numbers too, so the setting's name must refer to layers or their parts.
    """
    unknown = unknown_settings(config).items()
    return [name for name, value in unknown if _OF_LAYERS.search(name) and _numbers_layers(value, total)]


def _numbers_layers(value: Any, total: int) -> bool:
    if isinstance(value, dict):
        value = [int(key) if str(key).isdecimal() else None for key in value]
    if not isinstance(value, list | tuple) or not value:
        return False
    return len(set(map(str, value))) == len(value) and all(type(i) is int and 0 <= i < total for i in value)
