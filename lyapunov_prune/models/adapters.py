"""LoRA adapters added to the weights that they stand beside."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_line


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
        raise LyapunovPruneError(
            f"the adapters cannot be merged ({first_line(error)}); merge them with the tool that made them"
        ) from error
    model.__dict__.pop("peft_config", None)
    model._hf_peft_config_loaded = False
    return model
