"""Encoders, which read a text in both directions (BERT, RoBERTa, DeBERTa, ModernBERT, ELECTRA, …): which models are."""

from __future__ import annotations

from typing import Any, Literal

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from lyapunov_prune.errors import LyapunovPruneError

Stack = Literal["encoder", "decoder"]  # of an encoder-decoder
CAUSAL = "only profile, rank and prune accept it, and this needs a causal decoder"


def is_encoder(model: PreTrainedModel) -> bool:
    """Whether `model` is an encoder, with or without a head.

    It is one if transformers has a masked language model for its config, and `model` is not the causal class for it.
    """
    return _encodes(model.config, type(model))


def has_two_stacks(config: PreTrainedConfig) -> bool:
    """Whether the config is of an encoder-decoder that reads and writes text."""
    return bool(config.is_encoder_decoder) and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def encoder_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that the config of an encoder names as its architecture; None for other configs."""
    named = config.architectures or []
    found = getattr(transformers, named[0], None) if len(named) == 1 else None
    return found if isinstance(found, type) and _encodes(config, found) else None


def require_no_two_stacks(model: PreTrainedModel) -> None:
    """Raise LyapunovPruneError for an encoder-decoder, with `stack_remedy`."""
    if model.config.is_encoder_decoder:
        raise LyapunovPruneError(f"{type(model).__name__} is an encoder-decoder; {stack_remedy(model.config)}")


def stack_remedy(config: PreTrainedConfig) -> str:
    """What to do with an encoder-decoder where a model with one stack of layers is needed."""
    if has_two_stacks(config):
        return "profile, rank and prune take one of its two stacks, by --stack encoder or --stack decoder"
    return "give one that reads text"


def _encodes(config: Any, kind: type) -> bool:
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        return False
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return not getattr(config, "is_decoder", False) and kind is not causal
