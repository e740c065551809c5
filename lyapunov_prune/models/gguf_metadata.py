"""Architecture keys of a GGUF header, for the families whose settings llama.cpp can hold.

llama.cpp hard-codes what its keys cannot express: the activation, the scale of attention, which layers have a window. A
config that differs is refused, because its file would load and compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models.experts import chosen_by, count_of_experts
from lyapunov_prune.models.gguf_header import FLOAT32, UINT32, Value, number, text
from lyapunov_prune.models.gguf_layers import period_values, scaled_depth
from lyapunov_prune.models.gguf_vocabulary import CONVERT
from lyapunov_prune.progress import warn

# Widths of mixtures, by the names of settings.
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# The YaRN settings of transformers that llama.cpp computes alike.
_YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "type"}


@dataclass(frozen=True)
class GGUFFamily:
    """How llama.cpp holds the models of a `model_type`.

    `architecture` is its name there. `permuted`: rows of queries and keys are reordered so that rotary pairs are
    adjacent. `shifted`: norm weights are stored plus one. `windowed`: it knows windows by layer. `scaling`: the rotary
    scalings that it knows. `normed`: the weights of the experts that a token takes add up to one. `read`: transformers
    reads such files.
    """

    architecture: str
    activation: str = "silu"
    permuted: bool = False
    shifted: bool = False
    windowed: bool = False
    tied: bool = False
    biased: bool = False
    normed: bool = False
    read: bool = True
    scaling: tuple[str, ...] = ("default", "linear", "yarn")


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("llama", permuted=True, biased=True, scaling=("default", "linear", "yarn", "llama3")),
    "mistral": GGUFFamily("llama", permuted=True, scaling=("default", "linear", "yarn", "llama3")),
    "mixtral": GGUFFamily("llama", permuted=True, read=False),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "qwen2_moe": GGUFFamily("qwen2moe"),
    "qwen3_moe": GGUFFamily("qwen3moe", normed=True),
    "gemma2": GGUFFamily("gemma2", "gelu_pytorch_tanh", shifted=True, windowed=True, tied=True, scaling=("default",)),
    "gemma3_text": GGUFFamily(
        "gemma3", "gelu_pytorch_tanh", shifted=True, windowed=True, tied=True, scaling=("default", "linear")
    ),
    "phi3": GGUFFamily("phi3", scaling=("default", "longrope")),
}


def gguf_family(config: PretrainedConfig) -> GGUFFamily:
    """The entry of a family that can be written as GGUF; raises LyapunovPruneError for others."""
    found = FAMILIES.get(config.model_type)
    why: str | None = f"only {', '.join(FAMILIES)} are; {CONVERT}"
    if found is not None:
        why = _unknown(config, found)
    if found is None or why:
        raise LyapunovPruneError(f"this {config.model_type} is not written as GGUF: {why}")
    return found


def architecture_values(config: PretrainedConfig, family: GGUFFamily, name: str) -> dict[str, Value]:
    """All header keys except the tokenizer's; `name` is the name of the model."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head = head_size(config)
    context = _context(config, family)
    counts = {
        "block_count": config.num_hidden_layers,
        "context_length": context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": int(head * (_rope(config).get("partial_rotary_factor") or 1)),
        "vocab_size": config.vocab_size,
    }
    reals = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, **_rope_reals(config)}
    if family.architecture == "gemma2":
        reals["attn_logit_softcapping"] = config.attn_logit_softcapping
        reals["final_logit_softcapping"] = config.final_logit_softcapping
    if chosen := chosen_by(config):
        counts |= {"expert_count": count_of_experts(config), "expert_used_count": chosen[0]}
    counts |= {key: config.to_dict()[name] for key, name in _WIDTHS.items() if hasattr(config, name)}
    own = {key: number(value, UINT32) for key, value in counts.items()}
    own |= {key: number(value, FLOAT32) for key, value in reals.items()}
    if family.windowed:
        own["attention.sliding_window"] = number(config.sliding_window)
        own |= period_values(family.architecture, tuple(kind == "full_attention" for kind in config.layer_types))
    elif family.architecture == "phi3":
        own["attention.sliding_window"] = number(0)  # without it, llama.cpp takes the file for an old one with a window
    rope = _rope(config)
    if rope["rope_type"] in ("linear", "yarn"):
        own["rope.scaling.type"] = text(rope["rope_type"])
    if rope["rope_type"] in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = number(rope["original_max_position_embeddings"])
    return {
        "general.architecture": text(family.architecture),
        "general.type": text("model"),
        "general.name": text("Mistral" if name == "mistral" else name),  # transformers takes "mistral" for a class
        **{f"{family.architecture}.{key}": value for key, value in own.items()},
    }


def rope_tensors(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Tensors of a GGUF file that no checkpoint holds: factors of the rotary frequencies, by name."""
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        dims = torch.arange(0, head_size(config), 2, dtype=torch.float32) / head_size(config)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        return {"rope_freqs.weight": rope["rope_theta"] ** -dims / scaled}
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{each}.weight": torch.tensor(rope[f"{each}_factor"]) for each in ("long", "short")}
    return {}


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)


def attention_scalar(config: PretrainedConfig, architecture: str) -> int:
    """The number by whose root llama.cpp divides queries times keys: the width of a head, in one depth another."""
    if config.num_hidden_layers == scaled_depth(architecture):
        return int(config.hidden_size // config.num_attention_heads)
    return head_size(config)


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary settings of layers with full attention."""
    told = config.rope_parameters
    return told.get("full_attention", told)


def _rope_reals(config: PretrainedConfig) -> dict[str, float]:
    rope = _rope(config)
    reals = {"rope.freq_base": rope["rope_theta"]}
    local = config.rope_parameters.get("sliding_attention")
    if local is not None:
        reals["rope.freq_base_swa"] = local["rope_theta"]
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        reals["rope.scaling.factor"] = rope["factor"]
    if kind == "longrope":
        _, reals["rope.scaling.attn_factor"] = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    return reals


def _context(config: PretrainedConfig, family: GGUFFamily) -> int:
    """The longest context that llama.cpp computes correctly: for some families it does not know the window."""
    most: int = config.max_position_embeddings
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = (getattr(config, "sliding_window", None) or most) if "sliding_attention" in kinds else most
    if family.windowed or window >= most:
        return most
    warn(
        f"llama.cpp knows no windows of {family.architecture}: the file is limited to the {window} tokens of one window"
    )
    return int(window)


def _unknown(config: PretrainedConfig, family: GGUFFamily) -> str | None:
    """The first setting that a file of this family cannot express, in words; None if it can express all."""
    act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    scale = getattr(config, "query_pre_attn_scalar", None)
    wanted = attention_scalar(config, family.architecture)
    rope = config.rope_parameters
    local = rope.get("sliding_attention", {}).get("rope_type", "default")
    wrong = {
        f"activation {act}": act != family.activation,
        f"query_pre_attn_scalar {scale}": scale is not None and scale != wanted,
        f"rotary scaling {_rope(config)['rope_type']}": _rope(config)["rope_type"] not in family.scaling,
        f"rotary scaling {local} of windows": local != "default",
        "a rotary scaling of its own kind": _rope(config)["rope_type"] == "yarn" and bool(_rope(config).keys() - _YARN),
        "an output matrix of its own": family.tied and not config.tie_word_embeddings,
        "biases": not family.biased and any(getattr(config, key, False) for key in ("attention_bias", "mlp_bias")),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "softcapped logits": family.architecture == "gemma3"
        and any(getattr(config, f"{key}_logit_softcapping", None) for key in ("attn", "final")),
        "no softcapped logits": family.architecture == "gemma2"
        and not (config.attn_logit_softcapping and config.final_logit_softcapping),
        "dense layers between those of experts": bool(getattr(config, "mlp_only_layers", None))
        or getattr(config, "decoder_sparse_step", 1) != 1,
        f"norm_topk_prob {not family.normed}": getattr(config, "norm_topk_prob", family.normed) != family.normed,
        "heads of another width": family.architecture == "phi3"
        and head_size(config) * config.num_attention_heads != config.hidden_size,
    }
    what = first_of(wrong)
    return what and f"llama.cpp has no {family.architecture} with {what}; leave it as it is"
