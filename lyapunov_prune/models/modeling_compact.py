"""A transformer without some attentions, with merged feed-forward blocks, or with matrices factored in two.

This file lies beside the weights of every compact checkpoint, so that transformers can load it with
`trust_remote_code=True`; it imports only torch and transformers. Each class below is the transformers class that it is
named after, built whole and then changed by the list `cuts` in config.json. The list has one entry per layer: for each
changed module of the layer, what replaces it.

- `none`: an attention is removed and adds nothing to the state;
- `identity`: the input is returned, in place of a norm that only fed such an attention, or of a merged block's
  activation;
- `linear`, `affine`: a merged feed-forward block is one square matrix, without or with a bias;
- `low-rank 192:40 192:40 576:90`: a matrix is split into runs of rows, each `rows:rank` a product of two factors;
- `affine low-rank 576:90`, `linear low-rank 576:90`: the same for the matrix of a merged block.

A cache has one entry for each remaining attention, so attentions are renumbered (`layer_idx`), and entries of a new
cache for layers without attention are removed. With the old numbers and layer 0's attention removed, transformers would
find zero tokens in the cache and silently restart at the first position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    DeiTForImageClassification,
    DynamicCache,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    OPTForCausalLM,
    Phi3ForCausalLM,
    PhiForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
    ViTForImageClassification,
)

Cuts = list[dict[str, str]]


class NoAttention(nn.Module):
    """Replaces an attention: adds zero to the residual stream and leaves the cache alone."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states.new_zeros(()).expand_as(hidden_states), None


class LowRank(nn.Module):
    """Replaces a matrix, for each run of rows by `y_i = L_i (R_i x) + b_i`.

    `right` stacks all R_i (rank × inputs); `left` holds the L_i (rows × rank) with their biases.
    """

    def __init__(self, inputs: int, rows: list[int], ranks: list[int], bias: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.right = nn.Linear(inputs, sum(ranks), bias=False)
        self.left = nn.ModuleList(nn.Linear(r, m, bias=bias) for m, r in zip(rows, ranks, strict=True))

    @classmethod
    def of(cls, form: str, old: Any) -> LowRank:
        """The replacement of the matrix `old` by `form`; `old` is output × input, or transposed as in GPT-2."""
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
    """Renumber `layer_idx`, by which an attention finds its cache entry, over the remaining attentions."""
    position = 0
    for layer in layers:
        attentions = [module for name, module in layer.named_modules() if name and hasattr(module, "layer_idx")]
        for module in attentions:
            module.layer_idx = position
        position += bool(attentions)


def fit_cache(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a forward: drop cache entries of layers without attention, if the cache has an entry for every layer."""
    cuts, use = backbone.config.cuts, kwargs.get("use_cache")
    cache: Any = kwargs.get("past_key_values")
    if cache is None and (getattr(backbone.config, "use_cache", False) if use is None else use):
        cache = kwargs["past_key_values"] = DynamicCache(config=backbone.config)
    if len(getattr(cache, "layers", ())) == len(cuts):
        has_attention = ["none" not in places.values() for places in cuts]
        cache.layers = [entry for entry, has in zip(cache.layers, has_attention, strict=True) if has]
    return args, kwargs


class Compact:
    """The part that all compact model classes share, in front of their transformers class."""

    config: Any
    config_class: Any
    layers_path: str
    _auto_class: str

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.cut(config.cuts)
        self.post_init()  # type: ignore[attr-defined]

    def cut(self: Any, cuts: Cuts) -> None:
        """Change this model in place by `cuts`, one entry per layer; new matrices have arbitrary weights."""
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

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """The plain class's answer; transformers would look for experts in the source of this module."""
        return bool(cls.__bases__[1]._can_set_experts_implementation())  # type: ignore[attr-defined]


class Block(dict[str, Any]):
    """An entry of DeciLM's `block_configs`; vLLM reads its items as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def read_blocks(config: Any) -> None:
    if getattr(config, "block_configs", None):
        config.block_configs = [Block({k: Block(v) for k, v in each.items()}) for each in config.block_configs]


class CompactConfig:
    """The part that all compact configs share, in front of their transformers class."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        read_blocks(self)


# Each class of transformers, and where it keeps its layers.
PLAIN: dict[Any, str] = {
    DeiTForImageClassification: "deit.layers",
    Gemma2ForCausalLM: "model.layers",
    Gemma3ForCausalLM: "model.layers",
    GemmaForCausalLM: "model.layers",
    GPT2LMHeadModel: "transformer.h",
    GPTNeoXForCausalLM: "gpt_neox.layers",
    GraniteForCausalLM: "model.layers",
    LlamaForCausalLM: "model.layers",
    MistralForCausalLM: "model.layers",
    MixtralForCausalLM: "model.layers",
    Olmo2ForCausalLM: "model.layers",
    Olmo3ForCausalLM: "model.layers",
    OPTForCausalLM: "model.decoder.layers",
    Phi3ForCausalLM: "model.layers",
    PhiForCausalLM: "model.layers",
    Qwen2ForCausalLM: "model.layers",
    Qwen3ForCausalLM: "model.layers",
    Qwen3MoeForCausalLM: "model.layers",
    SmolLM3ForCausalLM: "model.layers",
    ViTForImageClassification: "vit.layers",
}


def compact_class(plain: Any, layers_path: str) -> Any:
    """`CompactLlama` for `LlamaForCausalLM`, for example, with the `config_class` `CompactLlamaConfig`."""
    stem, _, task = plain.__name__.removesuffix("LMHeadModel").partition("For")
    family = plain.config_class.model_type
    here = {"__module__": __name__}
    config: Any = type(
        f"Compact{stem}Config",
        (CompactConfig, plain.config_class),
        {"model_type": f"compact_{family}", "family": family, "_auto_class": "AutoConfig", **here},
    )
    auto = "AutoModelForImageClassification" if task == "ImageClassification" else "AutoModelForCausalLM"
    fields = {"config_class": config, "layers_path": layers_path, "_auto_class": auto, **here}
    return type(f"Compact{stem}", (Compact, plain), fields)


CLASSES: dict[str, Any] = {}
for _made in (compact_class(*each) for each in PLAIN.items()):
    CLASSES |= {_made.__name__: _made, _made.config_class.__name__: _made.config_class}


def __getattr__(name: str) -> Any:
    """Gives the classes by the names that `auto_map` in config.json uses."""
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(name)
