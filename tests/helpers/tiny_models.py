"""Tiny random models of every family, and a tokenizer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.data import ImageBatch
from lyapunov_prune.data.batch import TokenBatch, Tokens, checked_batch
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.models.plain import plain
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning import surgery
from lyapunov_prune.pruning.plan import PruningPlan, as_plan
from lyapunov_prune.pruning.surgery import Operation

LAYERS = 6


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


_SLIDING = {"sliding_window": 8}


# Every kind of layer a family mixes, and its switches.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("llama", {}),
    "mistral": ("mistral", _SLIDING),
    "qwen2": ("qwen2", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 3}),
    "qwen3": ("qwen3", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3}),
    "phi3": ("phi3", _SLIDING),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


# Those that do something no other does: the layers of Mistral, Qwen 2 and Qwen 3 are Llama's with windows, biases and
# norms that others have, GPT-2's scale by the number of the layer matters where layers get other numbers
# (pruning/conftest.py), and tests/families takes layers from every family there is.
KINDS = tuple(name for name in TINY if name not in ("gpt2-inverse-layer", "mistral", "qwen2", "qwen3"))


def make_tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of the family, float32, with weights large enough for every layer to matter."""
    model_type, extra = TINY[name]
    return _built(_large, model_type, seed, {**SMALL, **extra, **changes})


def from_settings(model_type: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model of this config, in eval mode."""
    return _built(_random, model_type, seed, settings)


def _random(model_type: str, seed: int, settings: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def _large(model_type: str, seed: int, settings: dict[str, Any]) -> PreTrainedModel:
    return with_large_weights(_random(model_type, seed, settings))


_made: dict[tuple[Any, ...], tuple[PreTrainedModel, torch.Tensor]] = {}


def _built(
    make: Callable[..., PreTrainedModel], model_type: str, seed: int, settings: dict[str, Any]
) -> PreTrainedModel:
    """What `make` returns, as a copy of its first result: building takes transformers four times as long."""
    key = make, model_type, seed, repr(settings), torch.get_default_dtype()
    if key not in _made:
        model = make(model_type, seed, copy.deepcopy(settings))
        if model.num_parameters() > 10**6:
            return model
        _made[key] = model, torch.get_rng_state()
    model, state = _made[key]
    torch.set_rng_state(state)  # as after building
    return copy.deepcopy(model)


# Three layers of eight experts, two of them for a token. The deepest family chooses among two groups, and has a dense
# layer, a shared expert and a bias for the choice; gpt_oss has biases everywhere.
_MIXTURE = {
    **SMALL,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {},
    "granitemoe": {},
    "deepseek_v3": {
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 4,
        **_LATENT,
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8},
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_interval": 1, "moe_layer_start_index": 0},
    # Their routers score more than the experts: shared ones, ones that compute nothing, a skip.
    "inkling_text": {
        "n_shared_experts": 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "d_rel": 4,
    },
    "longcat_flash": {
        "num_layers": 3,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        **_LATENT,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def make_mixture(name: str, **changes: Any) -> PreTrainedModel:
    """A random mixture of experts of the family, float32, with weights large enough for every expert to matter."""
    declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[name])}
    settings = {key: value for key, value in _MIXTURE.items() if key in declared}
    return with_large_weights(from_settings(name, **{**settings, **MIXTURES[name], **changes}))


def as_batch(model: PreTrainedModel, batch: Tokens) -> TokenBatch:
    """The windows, checked for this model."""
    return checked_batch(find_structure(model), batch)


def make_small(name: str, **changes: Any) -> PreTrainedModel:
    """A compact model of the family: no attention in layers 0 and 4, one matrix for two blocks."""
    model = make_tiny(name, **changes)
    W = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 4
    return make_compact(model, Cuts(attention=(0, 4), merged={1: (W, torch.ones(32)), 4: (W.T, None)}))


def with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


IMAGE_MODELS = {"vit": transformers.ViTForImageClassification, "deit": transformers.DeiTForImageClassification}


def make_classifier(model_type: str) -> PreTrainedModel:
    """A random ViT or DeiT of four layers that tells five classes of 8 × 8 images. Every layer matters."""
    kind = IMAGE_MODELS[model_type]
    small = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    images = {"num_hidden_layers": 4, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 5}
    torch.manual_seed(0)
    return with_large_weights(kind(kind.config_class(**small, **images)).eval())


def digits(n: int = 6, *, channels: int = 1, size: int = 8, seed: int = 0) -> ImageBatch:
    """Random images of 8 bits, scaled as a processor does, of five classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, channels, size, size), generator=generator) / 255
    return ImageBatch((pixels - 0.5) / 0.5, torch.arange(n) % 5, "digits", "all")


# A byte-level vocabulary with one merge: every text has a token sequence, nothing is unknown.
VOCABULARY = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]


def make_tokenizer(adds_bos: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 260 tokens, mostly one a byte."""
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[("t", "h")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = special or {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def operated(
    model: PreTrainedModel,
    plan: PruningPlan | Sequence[int],
    mends: Sequence[Any] = (),
    *,
    shared: bool = False,
) -> PreTrainedModel:
    """The cut, which proves nothing."""
    decoder = plain(model)
    return surgery.cut(decoder, Operation(as_plan(decoder, plan), mends=mends), shared=shared).model


def wrong_layer_idx(model: PreTrainedModel) -> None:
    find_structure(model).layers[1].self_attn.layer_idx = 3


def bert() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )


# Families with other orders of norms and branches: two layers each, found with no word about them in the package.
OTHERS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "phi": ({}, [("input_layernorm", "self_attn"), ("input_layernorm", "mlp")]),
    "cohere": ({}, [("input_layernorm", "self_attn"), ("input_layernorm", "mlp")]),
    "olmo2": ({}, [("self_attn", "post_attention_layernorm"), ("mlp", "post_feedforward_layernorm")]),
    "glm4": ({}, [("input_layernorm", "post_self_attn_layernorm"), ("post_attention_layernorm", "post_mlp_layernorm")]),
    "biogpt": ({}, [("self_attn_layer_norm", "self_attn"), ("final_layer_norm", "fc2")]),
    "lfm2": (
        {"layer_types": ["full_attention", "conv"], "block_ff_dim": 48},
        [("operator_norm", "self_attn"), ("ffn_norm", "feed_forward")],
    ),
}


PARALLEL = {"gpt_neox", "phi", "cohere"}


def make_other(model_type: str) -> PreTrainedModel:
    return from_settings(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        **OTHERS[model_type][0],
    )


def other_head(model_type: str, **extra: Any) -> PreTrainedModel:
    """A family that does more to its logits than multiply by a matrix."""
    model = from_settings(model_type, **SMALL, **extra)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=0.3)
    return model


def moe(model_type: str) -> PreTrainedModel:
    return from_settings(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
