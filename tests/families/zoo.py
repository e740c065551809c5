"""A tiny random model of every decoder that AutoModelForCausalLM of the installed transformers can build.

One recipe shrinks every config whose fields have the usual names. `CHANGES` holds what the recipe cannot
know: sizes with other names, and the switches that make a family mix all of its kinds of layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import helpers
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lyapunov_prune.models.from_folder import quiet

LAYERS = 8
VOCABULARY: int = helpers.SMALL["vocab_size"]
# A field that a config does not have is left out; an alias of transformers' attribute_map is followed.
SMALL: dict[str, Any] = {
    **helpers.SMALL,
    "num_hidden_layers": LAYERS,
    "is_decoder": True,
    # Encoder-decoders, of which only the decoder is built.
    "d_model": 32,
    "ffn_dim": 48,
    "decoder_layers": LAYERS,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_layers": LAYERS,  # caches are sized by it
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    # Windows shorter than the gate's input, so that they matter.
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "attention_chunk_size": 8,
    "local_attention": 8,
    # Mixtures of experts, the first layers dense.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    # Low-rank attention and its index.
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 16,
    "index_n_heads": 32,  # with few, ReLU makes all scores of a token zero, and the tie is broken by length
    "index_head_dim": 8,
    # Linear attention and state spaces.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "chunk_size": 8,
}
_ROTARY = {"rotary_dim": 4}
_DENSE_AND_SPARSE = {"mlp_only_layers": [1, 4]}
_ALTERNATING = {"layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2)}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_SHARED = {
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention", "full_attention"]
}
_LINEAR = ["linear_attention", "linear_attention"]
_MIXED = {"layer_types": [*_LINEAR, "full_attention", *_LINEAR, "full_attention", *_LINEAR[1:], "full_attention"]}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TEXT = {name: SMALL[name] for name in list(SMALL)[:11] if name != "head_dim"}
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_MIXED, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [2, 5, 7]},
    "big_bird": {"attention_type": "original_full"},  # it switches to this by itself on short inputs
    "blt": {
        "patcher_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
        },
        "encoder_config": {"hidden_size": 32, "num_attention_heads": 4, "hidden_size_global": 32},
        "decoder_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": LAYERS,
            "hidden_size_global": 32,
            "intermediate_size": 48,
        },
        "global_config": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48},
        "encoder_hash_byte_group_vocab": 50,
        "vocab_size": 260,
    },
    "cohere_compass_text": {
        **_ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "codegen": _ROTARY,
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 8},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 8, "num_key_value_heads": 1},
    "doge": {"keep_window_size": 8},
    "dots3_note": {
        "vision_config": {
            **VISION,
            "adapter_in_dim": 16,
            "adapter_out_dim": 32,
            "num_local_experts": 2,
            "per_layer_config": {},
        },
        "audio_config": {**VISION, "downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 32},
    },
    "dots3_note_text": {
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **VISION}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "flint": _DENSE_AND_SPARSE,
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
    "gemma3n_text": {
        **_PER_LAYER,
        **_SHARED,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0] * 4,
    },
    "gemma4_text": {**_PER_LAYER, **_SHARED, "num_kv_shared_layers": 2, "global_head_dim": 8},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_TEXT}},
    "gemma4_unified_text": {**_SHARED, "num_kv_shared_layers": 2, "global_head_dim": 8},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {**VISION, "mlp_dim": 16, "output_channels": 8, "global_attn_indexes": [1], "window_size": 2},
    },
    "git": {"vision_config": VISION},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "window_size": 8},
    "gptj": _ROTARY,
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "full", "full", "full", "shared", "full"]},
    "granitemoehybrid": _MIXED,
    "inkling2_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "d_rel": 4,
        "unpadded_vocab_size": VOCABULARY,
    },
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "d_rel": 4,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 48},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "kimi_linear": _MIXED,
    "longcat_flash": {"head_dim": 4, "num_layers": LAYERS, "zero_expert_num": 2, "num_hidden_layers": 2 * LAYERS},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {"dense_intermediate_size": 48, "index_block_size": 8, "index_topk_blocks": 2, **_ROTARY},
    "mllama": {"text_config": {"cross_attention_layers": [3, 6]}, "vision_config": {**VISION, "num_global_layers": 1}},
    "moshi": {"num_codebooks": 2},
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3", **_TEXT},
        "audio_config": {**VISION, "max_source_positions": 16, "hidden_size": 8, "num_mel_bins": 8},
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": _MIXED,
    "phi4_multimodal": {
        "vision_config": {**VISION, "crop_size": 28},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "prophetnet": {"num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "num_decoder_attention_heads": 4},
    "qwen4_exp_text": {
        "layer_types": ["indexed_attention" if i in (2, 5, 7) else "linear_attention" for i in range(LAYERS)],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 4,
        "ple_layer_ids": [1, 5],  # counted from one,
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "qwen2_moe": _DENSE_AND_SPARSE,
    "qwen3_moe": _DENSE_AND_SPARSE,
    "qwen3_5_moe_text": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_next": {**_DENSE_AND_SPARSE, **_MIXED},
    "recurrent_gemma": {
        "block_types": ["recurrent", "recurrent", "attention", "recurrent"],
        "lru_width": 32,
        "attention_window_size": 8,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 16),
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "attn_layers": ["local", "lsh"] * 4,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
        "num_buckets": 2,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": VOCABULARY,
        "shape_embed_dim": 8,
    },
    "smollm3": {"no_rope_layer_interval": 3, **_ALTERNATING},
    "xlnet": {"d_inner": 48},
    "xmod": {"default_language": "en_XX"},
    # Transformers gives other weights back where this family ties its embeddings.
    "youtu": {"tie_word_embeddings": False},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": {
        "layers_block_type": [*_LINEAR, "hybrid", *_LINEAR, "hybrid", *_LINEAR[1:], "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "adapter_rank": 4,
        "use_shared_attention_adapter": True,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
# A family whose switch changes what removal has to do, once more with the switch on.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba2-two-blocks": ("zamba2", {"num_mem_blocks": 2}),
    "ernie4_5_moe-interval": ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 6}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "qwen2_moe-sparse-step": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}
ZOO: tuple[str, ...] = tuple(sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]))

# Families without a row of their own whose layers hold the matrices of the first, by name and by kind of module.
_ALIKE = """
bart: bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr whisper
bert: bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm
bert: roc_bert roformer xlm-roberta xlm-roberta-xl
llama: bitnet cohere cohere2 cohere_compass_text cwm emu3 ernie4_5 exaone4 gemma gemma2 gemma3_text granite granite_swa
llama: helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder ministral ministral3 mistral olmo olmo2 olmo3 qwen2
llama: qwen3 seed_oss smollm3 stablelm vaultgemma
nemotron: apertus arcee jais2
opt: biogpt xglm
"""
ALIKE = {
    name: first for line in _ALIKE.strip().splitlines() for first, names in [line.split(": ")] for name in names.split()
}


def each_by_itself(names: Iterable[str]) -> list[Any]:
    """A parameter a decoder. All tests of one run in one process, which saves it once (`saved` in conftest.py)."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(f"zoo {name}")) for name in names]


def model_type_of(name: str) -> str:
    return VARIANTS[name][0] if name in VARIANTS else name


def matrices_of(model: PreTrainedModel) -> set[tuple[str, str]]:
    """The names of the parameters of its layers that have more than one dimension, and the classes that hold them."""
    inside = ((name, p) for name, p in model.named_parameters() if p.ndim > 1 and re.search(r"\.\d+\.", name))
    split = ((re.split(r"\.\d+\.", name, maxsplit=1)[1], name.rpartition(".")[0]) for name, _ in inside)
    return {(within, type(model.get_submodule(path)).__name__) for within, path in split}


def make_zoo(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model, float32, in eval mode, with weights large enough for every layer to matter."""
    kind = model_type_of(name)
    changes = {**CHANGES.get(kind, {}), **(VARIANTS[name][1] if name in VARIANTS else {})}
    config_class: Any = CONFIG_MAPPING[kind]
    torch.manual_seed(seed)
    with quiet():
        model = AutoModelForCausalLM.from_config(config_class(**settings_of(config_class, changes))).eval()
    return helpers.with_large_weights(model)


def settings_of(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    found: dict[str, Any] = {}
    for name, value in SMALL.items():
        for candidate in (name, config_class.attribute_map.get(name, name)):
            if candidate in fields:
                found[candidate] = value
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        found["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name, sub in config_class.sub_configs.items():
        if dataclasses.is_dataclass(sub) and name in ("text_config", "decoder"):
            kind = getattr(sub, "model_type", "")
            found[name] = settings_of(sub, {**CHANGES.get(kind, {}), **changes.get(name, {})})
        elif name in changes:
            found[name] = changes[name]
    return {**found, **{k: v for k, v in changes.items() if k not in config_class.sub_configs}}
