"""Whether a model is its plain weights: no adapter beside them, none packed, none elsewhere, no other input needed.

Removal copies weights and saves them. What it cannot do right is refused here, in one line with the remedy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import Structure, find_structure, require_causal


def require_plain(model: PreTrainedModel) -> None:
    """Raise LyapunovPruneError for attached adapters, and for quantised, offloaded and parametrised weights."""
    require_no_adapters(model)
    method = quantisation(getattr(model, "config", None))
    if method:
        raise LyapunovPruneError(f"the weights are {method}; {UNPACK}")
    require_in_memory(model)
    require_parameters(find_structure(model))


def require_no_adapters(model: nn.Module) -> None:
    adapted = [name for name, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A")]
    if adapted or hasattr(model, "peft_config"):
        where = f" to {len(adapted)} matrices ({adapted[0]}, …)" if adapted else ""
        raise LyapunovPruneError(
            f"adapters are attached{where}, which a plain checkpoint cannot hold; merge them first "
            "(lyapunov_prune.merge_adapters, or prune ADAPTER --merge-adapter)"
        )


def require_parameters(structure: Structure) -> None:
    """Raise LyapunovPruneError for a weight of a layer that is made anew at every forward: what is written is lost."""
    for name, module in structure.layers.named_modules(prefix=structure.layers_path):
        made = list(module.parametrizations) if is_parametrized(module) else _made_by_hooks(module)
        if made:
            raise LyapunovPruneError(
                f"{name}.{made[0]} is no parameter, but made of others at every forward; make it one (torch.nn.utils."
                "parametrize.remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove)"
            )


def _made_by_hooks(module: nn.Module) -> list[str]:
    """What the older weight_norm, spectral_norm and prune leave: `weight` on the instance, made of `weight_g` or so."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        and (name == "weight" or not module._parameters.keys().isdisjoint({f"{name}_g", f"{name}_orig"}))
    ]


def require_in_memory(model: nn.Module) -> None:
    elsewhere = [name for name, p in model.named_parameters() if p.is_meta]
    if elsewhere:
        raise LyapunovPruneError(
            f"{len(elsewhere)} weights are offloaded to another device or to disk ({elsewhere[0]}, …); load the model "
            "whole (device_map='cpu'), or prune its checkpoint with --on-disk"
        )


UNPACK = "give the original weights, or a GGUF file, which is dequantised on loading"


def quantisation(config: Any) -> str:
    """How the weights of a checkpoint with this config are packed, in words; empty for plain ones."""
    inner = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else None
    packed = getattr(config, "quantization_config", None) or getattr(inner, "quantization_config", None)
    if packed is None:
        return ""
    method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
    return f"quantised ({getattr(method, 'value', method) or 'an unnamed method'})"


def merge_adapters(model: Any) -> PreTrainedModel:
    """The base model with its LoRA adapters added to the weights: `W + s·BA`. `model` itself is changed.

    Takes a `peft.PeftModel`, or a transformers model with `load_adapter`. Needs the extra `lora`. Raises
    LyapunovPruneError when it is missing or the adapters cannot be merged.
    """
    try:
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise LyapunovPruneError("merging adapters needs peft; run: pip install 'lyapunov-prune[lora]'") from None
    try:
        if isinstance(model, PeftModel):
            model = model.merge_and_unload(safe_merge=True)
        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge(safe_merge=True)
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, module.get_base_layer())
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise LyapunovPruneError(
            f"the adapters cannot be merged ({reason}); merge them with the tool that made them"
        ) from error
    model.__dict__.pop("peft_config", None)
    model._hf_peft_config_loaded = False
    return model


def loading_class(model: PreTrainedModel) -> Any:
    """The class that loads `model` again with plain transformers.

    `AutoModelForCausalLM`, unless transformers itself defines `model`'s class and the auto class would build
    another one from its config, or none: a decoder inside a multimodal model comes back as that model.
    """
    automatic = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    found = automatic if isinstance(automatic, tuple) else (automatic,)
    own = type(model).__module__.startswith("transformers.") and type(model) not in found
    return type(model) if own else AutoModelForCausalLM


def is_wrapped(model: PreTrainedModel, structure: Structure) -> bool:
    """Whether the decoder is a part of a model with more than text."""
    return structure.config is not model.config


@torch.no_grad()
def require_text_alone(model: PreTrainedModel, structure: Structure, removed: tuple[int, ...]) -> None:
    """Raise LyapunovPruneError for a wrapped decoder whose removal token ids alone cannot show to be right."""
    kind = type(model).__name__
    run: set[int] = set()

    def note(index: int) -> Any:
        return lambda module, args, output: run.add(index)

    handles = [layer.register_forward_hook(note(i)) for i, layer in enumerate(structure.layers)]
    try:
        model(input_ids=torch.arange(4, device=model.device).unsqueeze(0), use_cache=False)
    except (TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:120].rstrip(".")
        raise LyapunovPruneError(
            f"{kind} does not run on text alone ({reason}); load its text model alone with AutoModelForCausalLM"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    require_causal(model)
    silent = sorted(set(range(structure.num_layers)) - run)
    if silent:
        raise LyapunovPruneError(
            f"layers {', '.join(map(str, silent))} of {kind} run only when there is an image, so no check on text "
            "can see that a removal is right; not supported"
        )
    levels = len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    early = [i for i in removed if i < levels]
    if early:
        raise LyapunovPruneError(
            f"layer {early[0]} of {kind} is one of the first {levels}, each of which takes in a level of the image; "
            f"remove layers from {levels} on"
        )
