"""What a GGUF file says of the forward, as settings of transformers' config.

transformers reads a part of the header. Here every key and every tensor is either a setting, known to change no
forward, or the reason to refuse the file. What llama.cpp computes with a key is what the key means.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import (
    GGUF_CONFIG_ARCHS,
    get_gguf_config,
    get_gguf_conversion_mapping,
    is_gguf_arch_supported,
    read_gguf_metadata,
)
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.ggml import Kind, dequantised
from lyapunov_prune.models.gguf_header import Header, Tensor
from lyapunov_prune.models.gguf_layers import full_attention
from lyapunov_prune.models.gguf_metadata import attention_scalar, head_size

# Keys under the architecture's name that transformers' reader leaves out or gives another name, as config settings.
_SETTINGS: Mapping[str, str] = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_OWN_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "falcon": {"attention.layer_norm_epsilon": "layer_norm_epsilon", "attention.head_count_kv": "num_kv_heads"},
    "gpt-oss": {"expert_feed_forward_length": "intermediate_size"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps"},
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
}
# Keys that change no forward: the tensors' shapes say the same, llama.cpp does not read them for these architectures,
# or they are read elsewhere here (windows by layer in `gguf_layers`).
_NO_EFFECT = frozenset(
    {
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.head_count_kv"),
        *("attention.sliding_window_pattern", "attention.value_length", "attention.causal", "tensor_data_layout"),
        *("context_length", "feed_forward_length", "vocab_size", "use_parallel_residual", "pooling_type"),
        *("expert_weights_norm", "rope.dimension_count", "rope.scaling.finetuned"),
    }
)
# Keys that say of something that there is none when they are zero.
_IF_ZERO = frozenset(
    {
        *("attention.clamp_kqv", "attention.head_count", "attention.scale", "attention.shared_kv_layers"),
        *("expert_count", "expert_group_count", "expert_shared_count", "expert_used_count", "expert_weights_scale"),
        *("embedding_scale", "leading_dense_block_count", "logit_scale", "moe_every_n_layers", "nextn_predict_layers"),
        *("residual_scale", "ssm.dt_b_c_rms"),
    }
)
# The only value of each that llama.cpp's graphs of these architectures compute.
_IF_EQUAL: Mapping[str, float] = {"attention.max_alibi_bias": 8.0, "expert_gating_func": 1, "expert_weights_scale": 1.0}
_ROPE = (
    *("rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# Tensors with factors of the rotary frequencies, which no checkpoint holds.
_FREQUENCIES, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_SCALED = {"llama": (_FREQUENCIES,), "phi3": (_SHORT, _LONG)}


def read_settings(header: Header, config: PreTrainedConfig) -> None:
    """Complete `config`, which transformers read from the file of `header`, by what it left out.

    Floats become the shortest decimal with the same float32 value. Raises LyapunovPruneError, which names the key or
    tensor, for one whose effect no setting expresses.
    """
    name = header.architecture
    if getattr(config, "is_heterogeneous", False):  # Gemma 4: no key is read as the setting of single layers
        raise _refusal(header, "layers of several widths", name)
    inside = f"{name}."
    own = {key.removeprefix(inside): header.read(key) for key in header.values if key.startswith(inside)}
    own = {key: shortest(value) if isinstance(value, float) else value for key, value in own.items()}
    read, added = _read_by_transformers(header), {**_SETTINGS, **_OWN_SETTINGS.get(name, {})}
    rotary = hasattr(config, "rope_parameters")
    _round(vars(config))
    for key, value in own.items():
        turns = key.startswith("rope.") and (not rotary or key in _ROPE)
        if key in added:
            _set(header, config, key, added[key], value)
        elif not (turns or key in read or key in _NO_EFFECT or _says_nothing(key, value)):
            raise _refusal(header, inside + key, str(value)[:40])
    _require_equal_widths(header, own)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for part, setting in (("attn_output.bias", "attention_bias"), ("ffn_up.bias", "mlp_bias")):
        if f"blk.0.{part}" in tensors and hasattr(config, setting):
            setattr(config, setting, True)
    _set_attention(header, config)
    if rotary and config.rope_parameters:
        _set_rope(header, config, own, {each: tensors[each] for each in _SCALED.get(name, ()) if each in tensors})


def require_used(header: Header, model: PreTrainedModel) -> None:
    """Raise LyapunovPruneError, which names it, for a tensor of the file that `model` was read without."""
    name = header.architecture
    if is_gguf_arch_supported(name):
        mapping = get_gguf_conversion_mapping(name, model.config)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        called = {each.name: rename_source_key(each.name, renamings, converters)[0] for each in header.tensors}
        held = model.state_dict().keys()
        # A block that predicts further tokens takes no part in a forward; transformers calls it `mtp`.
        taken = {old for old, new in called.items() if new in held or new.startswith("mtp.")}
    else:
        processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config=model.config.to_dict())
        taken = {*get_gguf_hf_weights_map(model, processor), *_SCALED.get(name, ())}
    for tensor in header.tensors:
        if not {tensor.name, tensor.name.removesuffix(".weight")} & taken:
            raise _refusal(header, tensor.name, f"{' × '.join(map(str, reversed(tensor.dims)))} numbers")


def shortest(value: float) -> float:
    """The shortest decimal with the float32 value of `value`: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _round(settings: dict[str, Any]) -> None:
    """Replace floats that are float32 numbers, as those of a header are and defaults are not, by the `shortest`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _round(value)
        elif isinstance(value, float) and float(np.float32(value)) == value:
            settings[name] = shortest(value)


class _Asked(dict[str, Any]):
    """A dictionary that remembers which of its keys were looked up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)


def _read_by_transformers(header: Header) -> Iterable[str]:
    """The keys under the architecture's name that transformers' reader reads, or skips on purpose."""
    name = header.architecture
    if name in GGUF_CONFIG_ARCHS:
        asked = _Asked(read_gguf_metadata(str(header.path))[0])
        get_gguf_config(asked, ())
        return {key.removeprefix(f"{name}.") for key in asked.keys_asked}
    known: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    plain = name.replace("-", "").replace("_", "")
    return next((keys for each, keys in known.items() if each.replace("_", "") == plain), {})


def _says_nothing(key: str, told: Any) -> bool:
    return (key in _IF_ZERO and not told) or (key in _IF_EQUAL and told == _IF_EQUAL[key])


def _refusal(header: Header, what: str, told: str) -> LyapunovPruneError:
    return LyapunovPruneError(
        f"{header.path} holds {what} ({told}), which transformers' {header.architecture} cannot represent and the "
        "model needs; give the original checkpoint"
    )


def _set(header: Header, config: PreTrainedConfig, key: str, setting: str, told: Any) -> None:
    if setting == "head_dim" and told == head_size(config):
        return  # some classes declare no head_dim
    if setting == "sliding_window" and (not told or full_attention(header) is None):
        return  # llama.cpp reads no window of most architectures
    if setting != "head_dim" and not hasattr(config, setting):
        if told:
            raise _refusal(header, f"{header.architecture}.{key}", str(told))
        return
    setattr(config, setting, told)


def _require_equal_widths(header: Header, own: Mapping[str, Any]) -> None:
    key, value = own.get("attention.key_length"), own.get("attention.value_length")
    if None not in (key, value) and key != value:
        raise _refusal(header, f"{header.architecture}.attention.value_length", f"{value}, and keys have {key}")


def _set_attention(header: Header, config: PreTrainedConfig) -> None:
    """The scale of attention, which llama.cpp derives, and which layers have a window (one period unless listed)."""
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = attention_scalar(config, header.architecture)
    full = full_attention(header) if getattr(config, "layer_types", None) else None
    if full is not None and header.architecture == "gemma3" and not header.read("gemma3.attention.sliding_window"):
        full = (True,) * header.layers
    if full is not None:
        config.layer_types = ["full_attention" if each else "sliding_attention" for each in full]


def _set_rope(header: Header, config: PreTrainedConfig, told: Mapping[str, Any], factors: Mapping[str, Tensor]) -> None:
    """Base, share and scaling of the rotary frequencies of layers with full attention, and the base of windows."""
    rope, local = config.rope_parameters, config.rope_parameters.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    rope["rope_theta"] = told.get("rope.freq_base", 10000.0)
    if local is not None:
        local["rope_theta"] = told.get("rope.freq_base_swa", 10000.0)
    elif told.get("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise _refusal(header, f"{header.architecture}.rope.freq_base_swa", str(told["rope.freq_base_swa"]))
    head, turned = head_size(config), told.get("rope.dimension_count")
    if turned and turned != getattr(config, "rotary_dim", head):
        if "partial_rotary_factor" not in rope and not hasattr(config, "partial_rotary_factor"):
            raise _refusal(header, f"{header.architecture}.rope.dimension_count", f"{turned} of {head}")
        rope["partial_rotary_factor"] = turned / head
    rope |= _scaling(header, config, rope, told, factors)


def _scaling(
    header: Header,
    config: PreTrainedConfig,
    rope: Mapping[str, Any],
    told: Mapping[str, Any],
    factors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The settings of the rotary scaling; empty if there is none."""
    context = told.get("rope.scaling.original_context_length", config.max_position_embeddings)
    attention = told.get("rope.scaling.attn_factor", 1.0)
    factor = told.get("rope.scaling.factor") or told.get("rope.scale_linear") or 1.0
    kind = told.get("rope.scaling.type", "linear") if factor != 1 else "none"
    values = {name: [shortest(value) for value in _numbers(tensor)] for name, tensor in factors.items()}
    if _FREQUENCIES in values:
        if head_size(config) != 2 * len(values[_FREQUENCIES]):  # a header may ask for more than any memory holds
            raise _refusal(header, f"heads of {head_size(config)}", f"{len(values[_FREQUENCIES])} frequencies")
        return _by_factors(config, rope, values[_FREQUENCIES])
    if values:
        parts = {"short_factor": values[_SHORT], "long_factor": values[_LONG]}
        scaled = {"rope_type": "longrope", "attention_factor": attention, **parts}
        return {**scaled, "original_max_position_embeddings": context}
    if kind == "yarn":
        betas = {each: told.get(f"rope.scaling.yarn_{each}") for each in ("beta_fast", "beta_slow")}
        scaled = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": context}
        scaled |= {each: value for each, value in betas.items() if value is not None}
        if attention != 1:
            scaled["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
        return scaled
    if attention != 1:
        raise _refusal(header, f"{header.architecture}.rope.scaling.attn_factor", str(attention))
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind != "none":
        raise _refusal(header, f"{header.architecture}.rope.scaling.type", kind)
    return {}


def _by_factors(config: PreTrainedConfig, rope: Mapping[str, Any], factors: list[float]) -> dict[str, Any]:
    """The scaling of Llama 3 that gives these factors of the frequencies, else one that lists them (longrope)."""
    head = head_size(config)
    wanted = 1 / (torch.tensor(factors) * rope["rope_theta"] ** (torch.arange(0, head, 2) / head))
    trial, scaled = copy.copy(config), {"rope_type": "llama3", "factor": max(factors)}
    for power in range(5, 21):
        candidate = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2**power}
        trial.rope_parameters = {**rope, **scaled, **candidate}
        if torch.allclose(ROPE_INIT_FUNCTIONS["llama3"](trial, "cpu")[0], wanted, rtol=1e-5, atol=0):
            return scaled | candidate
    context = config.max_position_embeddings
    listed = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": context}
    return {"rope_type": "longrope", "attention_factor": 1.0, **listed}


def _numbers(tensor: Tensor) -> np.ndarray:
    raw = np.fromfile(tensor.file, np.uint8, tensor.size, offset=tensor.start)
    return dequantised(raw, Kind(tensor.kind)).ravel()
