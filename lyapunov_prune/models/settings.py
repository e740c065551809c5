"""Settings of a config: those that affect the forward, those that transformers does not read, those of single layers.

Four forms describe single layers in nearly all families; what only one family does is in `families.py`:

- a list with one entry per layer (`layer_types`, `no_rope_layers`, …). If the class has a default for it, that default
  must have the default number of layers too: a list of two limits is as long as a two-layer model only by chance;
- a list of layer indices (`mlp_only_layers`, `attn_layer_indices`, …);
- the number of first or last layers of a kind (`first_k_dense_replace`, `num_kv_shared_layers`, …);
- transformers' `per_layer_config`, overrides by layer index.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
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


# Lists of layer indices, by name: no rule can tell the indices `[0, 1]` from two flags.
INDEX_LISTS = (
    "attn_layer_indices",
    "cross_attention_layers",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "local_layer_ids",
    "mlp_only_layers",
    "moe_layers",
)
# Numbers of layers at the start, or at the end, that are of another kind.
FIRST_LAYERS = ("first_k_dense_replace", "max_window_layers", "moe_layer_start_index", "num_dense_layers")
LAST_LAYERS = ("num_kv_shared_layers",)
# Kinds of layers without keys and values, as named by transformers' caches.
NO_KEYS = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})


def lost_attention(before: Any, after: Any) -> str | None:
    """Why a hybrid model without attention is wrong: its cache counts positions by the keys; None if it has any."""
    had, has = (set(getattr(c, "layer_types", None) or ()) - NO_KEYS for c in (before, after))
    if has or not had:
        return None
    layers = ", ".join(str(i) for i, kind in enumerate(before.layer_types) if kind not in NO_KEYS)
    return f"no attention is left, and transformers' cache counts positions by its keys; keep one of layers {layers}"


def slice_settings(config: Any, count: str, kept: tuple[int, ...], total: int) -> list[str]:
    """Make `config` describe the layers `kept` of `total`, in place; `count` names its number of layers.

    Returns the deleted settings: those with layer numbers of unknown meaning (`unknown_layer_numbers`).
    """
    # transformers' overrides of single layers, by index
    overrides = config.to_dict()["per_layer_config"] if getattr(config, "is_heterogeneous", False) else None
    others = _other_lists(type(config), count)
    gone = [name for name in unknown_layer_numbers(config, total) if name not in INDEX_LISTS]
    for name in gone:
        delattr(config, name)
    fields = vars(config)
    if (fields.get("decoder_sparse_step") or 1) != 1:
        # A step cannot describe the kept layers; the list of exceptions beside it can.
        step, dense = fields["decoder_sparse_step"], fields.get("mlp_only_layers") or []
        config.mlp_only_layers = [i for i in range(total) if i in dense or (i + 1) % step]
        config.decoder_sparse_step = 1
    for name, value in list(fields.items()):
        if name in INDEX_LISTS and isinstance(value, list | tuple):
            setattr(config, name, type(value)(kept.index(i) for i in value if i in kept))
        elif isinstance(value, list | tuple) and len(value) == total and "token" not in name and name not in others:
            setattr(config, name, type(value)(value[i] for i in kept))
        elif name in FIRST_LAYERS and isinstance(value, int):
            setattr(config, name, sum(i < value for i in kept))
        elif name in LAST_LAYERS and isinstance(value, int):
            setattr(config, name, sum(i >= total - value for i in kept))
    # BART's decoder sizes its caches by `num_hidden_layers`, which counts the missing encoder's layers.
    for name in {count, "num_hidden_layers"}:
        # ProphetNet computes this from the encoder's number.
        elsewhere = name != count and isinstance(getattr(type(config), name, None), property)
        if getattr(config, name, None) == total and not elsewhere:
            setattr(config, name, len(kept))
    if overrides is not None:
        before = {int(index): values for index, values in overrides.items()}
        config.per_layer_config = {new: before[old] for new, old in enumerate(kept) if old in before}
    return gone


def _other_lists(kind: Callable[[], Any], count: str) -> frozenset[str]:
    """Lists whose default length differs from the default number of layers of the config's class."""
    try:
        default = kind()
    except Exception:  # the class has no complete defaults
        return frozenset()
    lists = {name: value for name, value in vars(default).items() if isinstance(value, list | tuple) and value}
    return frozenset(name for name, value in lists.items() if len(value) != getattr(default, count, None))
