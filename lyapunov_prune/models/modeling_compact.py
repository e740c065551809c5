"""A transformer without some attentions, some feed-forward blocks merged, some matrices the products of two factors.

This one file lies beside the weights of every compact checkpoint, so that transformers can load it with
`trust_remote_code=True`; it imports torch and transformers and nothing else. Each class below is the class of
transformers that it is named after, built whole and then cut by the list `cuts` in config.json. The list has an entry
a layer: what stands in the place of which module of the layer.

- `none`: nothing, of an attention; the layer hands on the state that it was given;
- `identity`: what goes in comes out, of a norm that served such an attention alone, or of a merged block's activation;
- `linear`, `affine`: one matrix, width by width, without and with a bias, of a merged feed-forward block;
- `low-rank 192:40 192:40 576:90`: of a matrix, as many runs of rows as named, each `rows:rank` the product of two;
- `affine low-rank 576:90`, `linear low-rank 576:90`: of a merged block's matrix the same.

A cache has an entry for each attention that is left. So attentions are numbered anew (`layer_idx`), and the entries of
a new cache that belong to no attention are taken out of it: with the old numbers and layer 0's attention gone,
transformers would count zero tokens in the cache and go on from the first position, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

Cuts = list[dict[str, str]]


class NoAttention(nn.Module):
    """In the place of an attention: it adds zero to the residual stream, and leaves the cache alone."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states.new_zeros(()).expand_as(hidden_states), None


class LowRank(nn.Module):
    """In the place of a matrix: run after run of its rows, `y_i = L_i (R_i x) + b_i`.

    `right` holds all R_i (rank × inputs) one below the other, `left` the L_i (rows × rank) with their biases.
    """

    def __init__(self, inputs: int, rows: list[int], ranks: list[int], bias: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.right = nn.Linear(inputs, sum(ranks), bias=False)
        self.left = nn.ModuleList(nn.Linear(r, m, bias=bias) for m, r in zip(rows, ranks, strict=True))

    @classmethod
    def of(cls, form: str, old: Any) -> LowRank:
        """What `form` says of the matrix `old`, be it stored output × input or, as GPT-2's, input × output."""
        parts = [tuple(map(int, part.split(":"))) for part in form.split()[1:]]
        rows, ranks = ([*numbers] for numbers in zip(*parts, strict=True))
        inputs, rest = divmod(old.weight.numel(), sum(rows))
        if rest or sum(rows) not in old.weight.shape or any(not 0 < r <= min(m, inputs) for m, r in parts):
            raise ValueError(f"{form} is not of a matrix of shape {tuple(old.weight.shape)}")
        return cls(inputs, rows, ranks, old.bias is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.right(x)
        if len(self.ranks) == 1:
            return self.left[0](middle)
        runs = zip(self.left, middle.split(self.ranks, dim=-1), strict=True)
        return torch.cat([left(part) for left, part in runs], dim=-1)


FORMS = {
    "none": lambda width: NoAttention(),
    "identity": lambda width: nn.Identity(),
    "linear": lambda width: nn.Linear(width, width, bias=False),
    "affine": lambda width: nn.Linear(width, width),
}
LOW_RANK = "low-rank"


def number_attentions(layers: nn.ModuleList) -> None:
    """`layer_idx`, by which an attention finds its entry of a cache, over the attentions that there are."""
    position = 0
    for layer in layers:
        attentions = [module for name, module in layer.named_modules() if name and hasattr(module, "layer_idx")]
        for module in attentions:
            module.layer_idx = position
        position += bool(attentions)


def fit_cache(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a forward: of a cache that still has an entry a layer, those of layers without attention go."""
    cuts, use = backbone.config.cuts, kwargs.get("use_cache")
    cache: Any = kwargs.get("past_key_values")
    if cache is None and (getattr(backbone.config, "use_cache", False) if use is None else use):
        cache = kwargs["past_key_values"] = DynamicCache(config=backbone.config)
    if len(getattr(cache, "layers", ())) == len(cuts):
        has_attention = ["none" not in places.values() for places in cuts]
        cache.layers = [entry for entry, has in zip(cache.layers, has_attention, strict=True) if has]
    return args, kwargs


class Compact:
    """What every compact model has before the class of transformers that it is."""

    config: Any
    config_class: Any
    layers_path: str
    _auto_class: str

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.cut(config.cuts)
        self.post_init()  # type: ignore[attr-defined]

    def cut(self: Any, cuts: Cuts) -> None:
        """Cut this model in place by a list with an entry a layer; the weights of new matrices are arbitrary."""
        layers = self.get_submodule(self.layers_path)
        if len(cuts) != len(layers):
            raise ValueError(f"the list of cuts is of {len(cuts)} layers, and the model has {len(layers)}")
        for layer, places in zip(layers, cuts, strict=True):
            for path, form in places.items():
                merged, low, factors = form.partition(LOW_RANK)
                module = FORMS[merged.strip()](self.config.hidden_size) if merged else layer.get_submodule(path)
                if low:
                    module = LowRank.of(low + factors, module)
                layer.set_submodule(path, module.train(layer.training))
        number_attentions(layers)
        backbone = self.get_submodule(self.layers_path.rpartition(".")[0])
        if fit_cache not in backbone._forward_pre_hooks.values():
            backbone.register_forward_pre_hook(fit_cache, with_kwargs=True)


class Block(dict[str, Any]):
    """An entry of the `block_configs` of DeciLM: vLLM reads its items as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def read_blocks(config: Any) -> None:
    if getattr(config, "block_configs", None):
        config.block_configs = [Block({k: Block(v) for k, v in each.items()}) for each in config.block_configs]


class CompactLlamaConfig(LlamaConfig):
    model_type, family, _auto_class = "compact_llama", "llama", "AutoConfig"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        read_blocks(self)


class CompactLlama(Compact, LlamaForCausalLM):
    config_class, layers_path, _auto_class = CompactLlamaConfig, "model.layers", "AutoModelForCausalLM"


class CompactMistralConfig(MistralConfig):
    model_type, family, _auto_class = "compact_mistral", "mistral", "AutoConfig"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        read_blocks(self)


class CompactMistral(Compact, MistralForCausalLM):
    config_class, layers_path, _auto_class = CompactMistralConfig, "model.layers", "AutoModelForCausalLM"


class CompactQwen2Config(Qwen2Config):
    model_type, family, _auto_class = "compact_qwen2", "qwen2", "AutoConfig"


class CompactQwen2(Compact, Qwen2ForCausalLM):
    config_class, layers_path, _auto_class = CompactQwen2Config, "model.layers", "AutoModelForCausalLM"


class CompactQwen3Config(Qwen3Config):
    model_type, family, _auto_class = "compact_qwen3", "qwen3", "AutoConfig"


class CompactQwen3(Compact, Qwen3ForCausalLM):
    config_class, layers_path, _auto_class = CompactQwen3Config, "model.layers", "AutoModelForCausalLM"


class CompactGemma2Config(Gemma2Config):
    model_type, family, _auto_class = "compact_gemma2", "gemma2", "AutoConfig"


class CompactGemma2(Compact, Gemma2ForCausalLM):
    config_class, layers_path, _auto_class = CompactGemma2Config, "model.layers", "AutoModelForCausalLM"


class CompactGemma3Config(Gemma3TextConfig):
    model_type, family, _auto_class = "compact_gemma3_text", "gemma3_text", "AutoConfig"


class CompactGemma3(Compact, Gemma3ForCausalLM):
    config_class, layers_path, _auto_class = CompactGemma3Config, "model.layers", "AutoModelForCausalLM"


class CompactPhi3Config(Phi3Config):
    model_type, family, _auto_class = "compact_phi3", "phi3", "AutoConfig"


class CompactPhi3(Compact, Phi3ForCausalLM):
    config_class, layers_path, _auto_class = CompactPhi3Config, "model.layers", "AutoModelForCausalLM"


class CompactGPT2Config(GPT2Config):
    model_type, family, _auto_class = "compact_gpt2", "gpt2", "AutoConfig"


class CompactGPT2(Compact, GPT2LMHeadModel):
    config_class, layers_path, _auto_class = CompactGPT2Config, "transformer.h", "AutoModelForCausalLM"


class CompactGPTNeoXConfig(GPTNeoXConfig):
    model_type, family, _auto_class = "compact_gpt_neox", "gpt_neox", "AutoConfig"


class CompactGPTNeoX(Compact, GPTNeoXForCausalLM):
    config_class, layers_path, _auto_class = CompactGPTNeoXConfig, "gpt_neox.layers", "AutoModelForCausalLM"


class CompactOPTConfig(OPTConfig):
    model_type, family, _auto_class = "compact_opt", "opt", "AutoConfig"


class CompactOPT(Compact, OPTForCausalLM):
    config_class, layers_path, _auto_class = CompactOPTConfig, "model.decoder.layers", "AutoModelForCausalLM"


class CompactViTConfig(ViTConfig):
    model_type, family, _auto_class = "compact_vit", "vit", "AutoConfig"


class CompactViT(Compact, ViTForImageClassification):
    config_class, layers_path, _auto_class = CompactViTConfig, "vit.layers", "AutoModelForImageClassification"


class CompactDeiTConfig(DeiTConfig):
    model_type, family, _auto_class = "compact_deit", "deit", "AutoConfig"


class CompactDeiT(Compact, DeiTForImageClassification):
    config_class, layers_path, _auto_class = CompactDeiTConfig, "deit.layers", "AutoModelForImageClassification"
