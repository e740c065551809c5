"""Compact models as this package sees them: the known families, and which parts of their layers can be removed.

The classes are in `modeling_compact`, a copy of which lies beside the weights of every compact checkpoint. This package
always runs its own copy: it registers its classes with transformers, which then loads no code from the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError

MODULE = "modeling_compact.py"
PREFIX = "compact_"  # starts the `model_type` of every compact checkpoint
NO_ATTENTION = "no attention is left, and nothing would count positions in the cache of a decoder; keep one"


@dataclass(frozen=True)
class Layout:
    """The children of a layer that hold its attention and its feed-forward block, by name.

    `norms` feed only the attention and are removed with it, unless the config's switch `pre_norm` is off: then they are
    part of the residual stream and stay. The first child in `block` becomes the merged matrix, the others become
    identities.
    """

    attention: str
    norms: tuple[str, ...]
    block: tuple[str, ...] = ("mlp",)
    pre_norm: str = ""

    def norms_alone(self, config: Any) -> tuple[str, ...]:
        return self.norms if not self.pre_norm or getattr(config, self.pre_norm) else ()


_LLAMA = Layout("self_attn", ("input_layernorm",))
_GEMMA = Layout("self_attn", ("input_layernorm", "post_attention_layernorm"))
_OLMO = Layout("self_attn", ("post_attention_layernorm",))  # norms follow the sublayers
_VIT = Layout("attention", ("layernorm_before",))
LAYOUTS: dict[str, Layout] = {
    "deit": _VIT,
    "gemma": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": Layout("attn", ("ln_1",)),
    "gpt_neox": Layout("attention", ("input_layernorm",)),
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "opt": Layout("self_attn", ("self_attn_layer_norm",), ("fc1", "activation_fn", "fc2"), "do_layer_norm_before"),
    "phi": Layout("self_attn", ()),
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "smollm3": _LLAMA,
    "vit": _VIT,
}


# The families of `LAYOUTS` that are image classifiers.
CLASSIFIERS = ("vit", "deit")


def family_of(config: Any) -> str:
    """The `model_type`; for a compact model, that of the model it was cut from."""
    return getattr(type(config), "family", config.model_type)  # of the class: config.json may set any attribute


def is_compact(model: PreTrainedModel) -> bool:
    return model.config.model_type.startswith(PREFIX)


def stores_factors(config: Any, layer: int, path: str) -> bool:
    """Whether a layer of a model with this config holds two factors in place of the matrix `path`."""
    if not config.model_type.startswith(PREFIX):
        return False
    from lyapunov_prune.models.modeling_compact import LOW_RANK

    return LOW_RANK in config.cuts[layer].get(path, "")


def renumber_compact(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Renumber the attentions of a compact model after some of its layers were removed; other models are unchanged.

    Raises LyapunovPruneError if no attention is left.
    """
    if not is_compact(model):
        return
    from lyapunov_prune.models.modeling_compact import NoAttention, number_attentions

    attention = LAYOUTS[family_of(model.config)].attention
    if all(isinstance(layer.get_submodule(attention), NoAttention) for layer in layers):
        raise LyapunovPruneError(NO_ATTENTION)
    number_attentions(layers)


@cache
def compact_classes() -> dict[str, Any]:
    """The compact model class of every family; registers them with transformers."""
    from lyapunov_prune.models import modeling_compact  # every family's code

    classes: dict[str, Any] = {c.config_class.family: c for c in modeling_compact.Compact.__subclasses__()}
    autos = {auto.__name__: auto for auto in (AutoModelForCausalLM, AutoModelForImageClassification)}
    for model_class in classes.values():
        config_class = model_class.config_class
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        autos[model_class._auto_class].register(config_class, model_class, exist_ok=True)
    return classes


def compact_class(model: PreTrainedModel) -> Any:
    """The compact class for `model`. Raises LyapunovPruneError for an unknown class."""
    found = compact_classes().get(family_of(model.config))
    plain = found and (found.__bases__[1], found.config_class.__bases__[1])
    if found is None or (type(model), type(model.config)) not in (plain, (found, found.config_class)):
        if is_compact(model):
            raise LyapunovPruneError(
                f"this {type(model).__name__} is of code from its folder; load it with lyapunov_prune.load"
            )
        known = ", ".join(sorted(c.__bases__[1].__name__ for c in compact_classes().values()))
        raise LyapunovPruneError(
            f"the compact format has no row for {type(model).__name__} (LAYOUTS in models/compact.py), which would say "
            f"what is attention, block and norms in a layer; give one of {known}"
        )
    return found
