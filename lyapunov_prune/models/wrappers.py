"""A decoder inside a multimodal model: recognising it, reloading it, and judging it on text alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import require_causal


def auto_class(config: PreTrainedConfig, *, text_only: bool = False) -> Any:
    """The auto class that loads a checkpoint with this config whole.

    For some types (Qwen 3.5, Llama 4, Mllama, …) `AutoModelForCausalLM` builds the text model and drops the vision
    tower, and for others (Qwen 2.5 VL, Llava, …) it has no class. Those are loaded with `AutoModelForMultimodalLM`,
    unless the config names the text class as its architecture or `text_only` is given.

    Raises LyapunovPruneError if `text_only` needs a class that transformers does not have.
    """
    text, whole = (_class_of(config, m) for m in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING))
    apart = text is not None and text is not whole
    if whole is None or (apart and (text_only or text.__name__ in (config.architectures or ()))):
        return AutoModelForCausalLM
    if text_only:
        raise LyapunovPruneError(f"transformers has no text-only class for {whole.__name__}; leave out text_only")
    return AutoModelForMultimodalLM


def _class_of(config: PreTrainedConfig, mapping: Any) -> Any:
    found = mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def loading_class(model: PreTrainedModel) -> Any:
    """The class that loads `model` again with plain transformers.

    `AutoModelForCausalLM`, unless transformers itself defines `model`'s class and the auto class would build another
    one from its config, or none: a decoder inside a multimodal model is reloaded as that model. A class with its own
    code, such as a compact model's, names its auto class.
    """
    if model._auto_class is not None:
        return getattr(transformers, model._auto_class)
    automatic = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    classes = automatic if isinstance(automatic, tuple) else (automatic,)
    own = type(model).__module__.startswith("transformers.") and type(model) not in classes
    return type(model) if own else AutoModelForCausalLM


@torch.no_grad()
def require_text_alone(decoder: Decoder, removed: tuple[int, ...]) -> None:
    """Raise LyapunovPruneError for a wrapped decoder whose removal cannot be checked on token ids alone."""
    model, structure, kind = decoder.model, decoder.structure, type(decoder.model).__name__
    require_levels_stay(model, removed)
    run: set[int] = set()

    def note(index: int) -> Any:
        return lambda module, args, kwargs, output: run.add(index)

    with hooked(after=[(layer, note(i)) for i, layer in enumerate(structure.layers)]):
        require_causal(model)
    silent = sorted(set(range(structure.num_layers)) - run)
    if silent:
        raise LyapunovPruneError(
            f"layers {', '.join(map(str, silent))} of {kind} run only when there is an image, so checks on text "
            "cannot verify a removal; not supported"
        )


def require_levels_stay(model: PreTrainedModel, removed: tuple[int, ...]) -> None:
    """Raise LyapunovPruneError if a removed layer adds a level of image features, as Qwen 3 VL's first ones do."""
    kind = type(model).__name__
    levels = len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    early = [i for i in removed if i < levels]
    if early:
        raise LyapunovPruneError(
            f"layer {early[0]} of {kind} is one of the first {levels}, each of which reads one level of the image; "
            f"remove layers from {levels} on"
        )
