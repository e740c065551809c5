"""A decoder inside a model with more than text: how it is told, loaded again, and judged on text alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure, require_causal


def loading_class(model: PreTrainedModel) -> Any:
    """The class that loads `model` again with plain transformers.

    `AutoModelForCausalLM`, unless transformers itself defines `model`'s class and the auto class would build
    another one from its config, or none: a decoder inside a multimodal model comes back as that model. A class with
    code of its own, as a compact model's, names its auto class.
    """
    if model._auto_class is not None:
        return getattr(transformers, model._auto_class)
    automatic = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    classes = automatic if isinstance(automatic, tuple) else (automatic,)
    own = type(model).__module__.startswith("transformers.") and type(model) not in classes
    return type(model) if own else AutoModelForCausalLM


def is_wrapped(model: PreTrainedModel) -> bool:
    """Whether the decoder is a part of a model with more than text."""
    return model.config.get_text_config(decoder=True) is not model.config


@torch.no_grad()
def require_text_alone(model: PreTrainedModel, structure: Structure, removed: tuple[int, ...]) -> None:
    """Raise LyapunovPruneError for a wrapped decoder whose removal token ids alone cannot show to be right."""
    kind = type(model).__name__
    run: set[int] = set()

    def note(index: int) -> Any:
        return lambda module, args, kwargs, output: run.add(index)

    try:
        with hooked(after=[(layer, note(i)) for i, layer in enumerate(structure.layers)]):
            model(input_ids=torch.arange(4, device=model.device).unsqueeze(0), use_cache=False)
    except (TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:120].rstrip(".")
        raise LyapunovPruneError(
            f"{kind} does not run on text alone ({reason}); load its text model alone with AutoModelForCausalLM"
        ) from None
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
