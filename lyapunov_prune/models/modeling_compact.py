"""A transformer without some attentions, or with merged feed-forward blocks.

This file lies beside the weights of every compact checkpoint, so that transformers can load it with
`trust_remote_code=True`; it imports only torch and transformers. A class is made for every config of transformers that
it is asked for by name: the class that transformers makes of that config, built whole and then changed by the list
`cuts` in config.json. The list has one entry per layer: for each changed module of the layer, what replaces it.

- `none`: an attention is removed and adds nothing to the state; `none 3` if it returned three things instead of two,
  `none 0` if it returned a tensor, `none 1 list` if it returned a list of one;
- `identity`: the input is returned, in place of a norm that only fed such an attention, or of a merged block's
  activation;
- `linear`, `affine`: a merged feed-forward block is one square matrix, without or with a bias.

A cache has one entry for each remaining attention, so attentions are renumbered (`layer_idx`), and entries of a new
cache for layers without attention are removed. With the old numbers and layer 0's attention removed, transformers would
find zero tokens in the cache and silently restart at the first position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

Cuts = list[dict[str, str]]


class NoAttention(nn.Module):
    """Replaces an attention: adds zero to the residual stream and leaves the cache alone.

    It returns what the attention did: a tensor alone for `outputs` 0, else a tuple (or list) of `outputs`, the tensor
    first.
    """

    def __init__(self, outputs: str = "2", kind: str = "tuple") -> None:
        super().__init__()
        self.outputs, self.kind = int(outputs), {"tuple": tuple, "list": list}[kind]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        zero = hidden_states.new_zeros(()).expand_as(hidden_states)
        return self.kind([zero, *[None] * (self.outputs - 1)]) if self.outputs else zero


NUMBERS = ("layer_idx", "layer_id")
CACHES = ("past_key_values", "cache_params")  # the argument of a backbone that holds its cache
NONE = "none"


def stand_in(form: str, old: nn.Module, width: int) -> nn.Module:
    """The module that `form` names, in the place of `old`, in a layer whose state has `width` entries.

    Raises ValueError for an unknown form.
    """
    kind, *options = form.split()
    if kind == NONE:
        module: nn.Module = NoAttention(*options)
        for name in old._non_persistent_buffers_set:  # Falcon H1 fills these of every layer on loading
            module.register_buffer(name, old._buffers[name], persistent=False)
    elif kind == "identity":
        module = nn.Identity()
    elif kind in ("linear", "affine"):
        module = nn.Linear(width, width, bias=kind == "affine")
    else:
        raise ValueError(f"{kind} is no form that a module can have")
    return module.train(old.training)


def text_config(config: Any) -> Any:
    """The config that holds `cuts`, and `layers_path`: where the model keeps its layers."""
    return config.get_text_config(decoder=True)


def lacks_attention(places: dict[str, str]) -> bool:
    """Whether a layer has lost its attention, by its entry in `cuts`."""
    return any(form.startswith(NONE) for form in places.values())


def number_attentions(layers: nn.ModuleList, cuts: Cuts) -> None:
    """Renumber the attributes by which an attention finds its cache entry over the remaining attentions."""
    position = 0
    for layer, places in zip(layers, cuts, strict=True):
        for name, module in layer.named_modules():
            for number in NUMBERS:
                if name and hasattr(module, number):
                    setattr(module, number, position)
        position += not lacks_attention(places)


@cache
def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The argument of a backbone's forward that holds the cache; None if it has none."""
    taken = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in taken), None)


def fit_cache(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a forward: drop cache entries of layers without attention, if the cache has an entry for every layer."""
    config, name = text_config(backbone.config), cache_argument(type(backbone).forward)
    if name is None:
        return args, kwargs
    cache: Any = kwargs.get(name)
    use = kwargs.get("use_cache")
    if cache is None and (getattr(config, "use_cache", False) if use is None else use):
        cache = kwargs[name] = DynamicCache(config=config)
    if len(getattr(cache, "layers", ())) == len(config.cuts):
        entries = zip(cache.layers, config.cuts, strict=True)
        cache.layers = [entry for entry, places in entries if not lacks_attention(places)]
    return args, kwargs


class CompactSettings:
    """The part that all compact model classes share, in front of their transformers class."""

    config: Any
    config_class: Any
    _auto_class: str

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.cut(text_config(config).cuts)
        self.post_init()  # type: ignore[attr-defined]

    def cut(self: Any, cuts: Cuts) -> None:
        """Change this model in place by `cuts`, one entry per layer; new matrices have arbitrary weights."""
        config = text_config(self.config)
        layers = self.get_submodule(config.layers_path)
        if len(cuts) != len(layers):
            raise ValueError(f"the list of cuts is of {len(cuts)} layers, and the model has {len(layers)}")
        for layer, places in zip(layers, cuts, strict=True):
            for path, form in places.items():
                layer.set_submodule(path, stand_in(form, layer.get_submodule(path), config.hidden_size))
        number_attentions(layers, config.cuts)
        backbone = self.get_submodule(config.layers_path.rpartition(".")[0])
        if fit_cache not in backbone._forward_pre_hooks.values():
            backbone.register_forward_pre_hook(fit_cache, with_kwargs=True)

    @torch.no_grad()
    def initialize_weights(self: Any) -> None:
        """As the plain class does, whose backbone may fill buffers of the layers that no file holds (Falcon H1).

        Of classes that are not its own, transformers passes over modules without weights of their own. A backbone that
        can fill its own does: Gemma 3n's reads its own width.
        """
        super().initialize_weights()  # type: ignore[misc]
        backbone = self.get_submodule(text_config(self.config).layers_path.rpartition(".")[0])
        getattr(backbone, "_init_weights", self._init_weights)(backbone)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """The plain class's answer; transformers would look for experts in the source of this module."""
        return bool(cls.__bases__[1]._can_set_experts_implementation())  # type: ignore[attr-defined]


@cache
def compact_config(plain: Any) -> Any:
    """`CompactLlamaConfig` for `LlamaConfig`, for example."""
    family = plain.model_type
    fields = {"model_type": f"compact_{family}", "family": family, "_auto_class": "AutoConfig", "__module__": __name__}
    return type(f"Compact{plain.__name__}", (plain,), fields)


@cache
def compact_model(plain: Any) -> Any:
    """`CompactLlama` for `LlamaConfig`, for example: the class in front of the one that AutoModel makes of the config.

    None for a config of which transformers makes neither a causal language model nor an image classifier.
    """
    mappings = {
        "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForImageClassification": MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    }
    for auto, mapping in mappings.items():
        base: Any = mapping.get(plain, None)
        base = base[0] if isinstance(base, tuple) else base
        if base is not None:
            fields = {"config_class": compact_config(plain), "_auto_class": auto, "__module__": __name__}
            return type(f"Compact{plain.__name__.removesuffix('Config')}", (CompactSettings, base), fields)
    return None


def __getattr__(name: str) -> Any:
    """Gives the classes by the names that `auto_map` in config.json uses."""
    stem = name.removeprefix("Compact").removesuffix("Config")
    plain = getattr(transformers, f"{stem}Config", None)
    found = None
    if plain is not None and name.startswith("Compact"):
        found = compact_config(plain) if name.endswith("Config") else compact_model(plain)
    if found is None:
        raise AttributeError(name)
    return found
