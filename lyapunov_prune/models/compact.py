"""Compact models as this package sees them: which models have a compact class, how transformers finds it, and DeciLM.

The classes are in `modeling_compact`, a copy of which lies beside the weights of every compact checkpoint. This package
always runs its own copy: it registers its classes with transformers, which then loads no code from the folder.

vLLM (nemotron_nas.py) and llama.cpp (architecture deci) run Llama models without some attentions in a format of their
own, `DeciLMForCausalLM` with `block_configs`. Such a checkpoint is a compact one whose config.json describes the layers
twice: `block_configs` for engines, `cuts` for this package and the module beside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models import modeling_compact

MODULE = "modeling_compact.py"
PREFIX = "compact_"  # starts the `model_type` of every compact checkpoint
NO_ATTENTION = "no attention is left, and nothing would count positions in the cache of a decoder; keep one"
CLASSIFIERS = ("vit", "deit")  # the families of image classifiers


def family_of(config: Any) -> str:
    """The `model_type`; for a compact model, that of the model it was cut from."""
    return getattr(type(config), "family", config.model_type)  # of the class: config.json may set any attribute


def is_compact(model: PreTrainedModel) -> bool:
    return model.config.model_type.startswith(PREFIX)


def renumber_compact(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Renumber the attentions of a compact model after some of its layers were removed; other models are unchanged.

    Raises LyapunovPruneError if no attention is left.
    """
    if not is_compact(model):
        return
    cuts = modeling_compact.text_config(model.config).cuts
    if all(map(modeling_compact.lacks_attention, cuts)):
        raise LyapunovPruneError(NO_ATTENTION)
    modeling_compact.number_attentions(layers, cuts)


def register(family: str) -> Any:
    """The compact class of a `model_type`, known to transformers from now on; None if transformers has none."""
    if family not in CONFIG_MAPPING:
        return None
    plain: Any = CONFIG_MAPPING[family]
    found = modeling_compact.compact_model(plain)
    if found is not None:
        config = found.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        getattr(transformers, found._auto_class).register(config, found, exist_ok=True)
    return found


def compact_class(model: PreTrainedModel) -> Any:
    """The compact class for `model`. Raises LyapunovPruneError for a model that has none."""
    found = register(family_of(model.config))
    config = found and found.config_class
    if found is None or (type(model), type(model.config)) not in (
        (found.__bases__[1], config.__bases__[1]),
        (found, config),
    ):
        why = "is of code from its folder; load it with lyapunov_prune.load"
        if not is_compact(model):
            why = (
                f"is not what AutoModelForCausalLM or AutoModelForImageClassification builds of a "
                f"{type(model.config).__name__}, and only that can be compact; give a model of such a class"
            )
        raise LyapunovPruneError(f"this {type(model).__name__} {why}")
    return found


BLOCKS = "block_configs"  # a config that has it gets it rewritten on saving
_ARCHITECTURE = "DeciLMForCausalLM"
_FAMILIES = ("llama", "mistral")
_MULTIPLE = 256  # engines round widths derived from `ffn_mult` up to a multiple of this


def not_deci(config: Mapping[str, Any]) -> str | None:
    """Why engines cannot run a compact model with this config.json as DeciLM; None if they can."""
    family, cuts = str(config["model_type"]).removeprefix(PREFIX), config["cuts"]
    window = config.get("sliding_window")
    forms = {form for places in cuts for form in places.values()}
    wrong = {
        f"it is a {family}, and DeciLM are {' and '.join(_FAMILIES)}": family not in _FAMILIES,
        "it holds merged blocks, which no engine knows": bool(forms - {"none", "identity"}),
        "layer 0 lacks its attention, which engines need": "none" in cuts[0].values(),
        "every layer has its attention": "none" not in forms,
        "it has a sliding window": window is not None and window < config["max_position_embeddings"],
        f"its activation is {config['hidden_act']}": config["hidden_act"] != "silu",
    }
    return first_of(wrong)


def as_served(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, with `block_configs` (if it has them) recomputed from its `cuts`.

    They are dropped, and the config keeps its own class, if DeciLM can no longer express the model.
    """
    if BLOCKS not in config:
        return dict(config)
    rest = {key: value for key, value in config.items() if key != BLOCKS}
    if not_deci(rest):
        return rest
    return rest | {BLOCKS: [_block(rest, places) for places in rest["cuts"]], "architectures": [_ARCHITECTURE]}


def _block(config: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    gone = "none" in places.values()
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    width, hidden = config["intermediate_size"], config["hidden_size"]
    share = 1.5 * width / hidden
    told = -(-int(2 * share * hidden / 3) // _MULTIPLE) * _MULTIPLE  # the width that both engines compute
    ffn = {"ffn_mult": share} if told == width else {"intermediate_size": width}  # only vLLM reads intermediate_size
    attention = {"no_op": gone, "n_heads_in_group": None if gone else group, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"no_op": False, "replace_with_linear": False, **ffn}}
