"""Encoder-decoders (T5, BART, Marian, …): each of their two stacks as one chain of layers, and how both read a window.

The encoder reads the first half of a window. The decoder reads the start token and the second half, and predicts the
second half (teacher forcing). An error that begins in the decoder never reaches the encoder, so each stack is a chain:
the encoder's is followed by the whole decoder, the decoder's takes the encoder's output as given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.models.encoders import Stack, has_two_stacks
from lyapunov_prune.models.structure import Structure, backbone_of, layers_in

# Config names of the number of layers of each stack, narrower names first.
_COUNTS = {
    "encoder": ("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers", "num_hidden_layers"),
}


class BothStacks(nn.Module):
    """The backbone of an encoder-decoder: token ids to the decoder's final state, without the head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.encoder, self.decoder = model.get_encoder(), model.get_decoder()
        self._halves = partial(halves, model)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        """Windows × tokens (int64) to the decoder's output, whose first entry is windows × (tokens / 2 + 1) × width."""
        first, second = self._halves(input_ids)
        read = self.encoder(input_ids=first)[0]
        what = f"{type(self.decoder).__name__} does not run on token ids and the encoder's output alone"
        with reported(what, "not supported", TypeError):
            return self.decoder(input_ids=second, encoder_hidden_states=read, use_cache=use_cache)


def halves(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the encoder and the decoder read of windows of `ids`: the first half; the start token and the second half.

    Raises LyapunovPruneError if neither config nor generation config name the start token.
    """
    named = (getattr(c, "decoder_start_token_id", None) for c in (model.config, model.generation_config))
    start = next((token for token in named if token is not None), None)
    if start is None:
        raise LyapunovPruneError(
            f"neither config nor generation config of this {type(model).__name__} name the decoder_start_token_id, "
            "with which its decoder begins; set it there"
        )
    half = ids.shape[1] // 2
    return ids[:, :half], torch.cat([torch.full_like(ids[:, :1], start), ids[:, half:]], dim=1)


def decoder_call(model: PreTrainedModel, ids: torch.Tensor) -> tuple[Callable[..., Any], torch.Tensor]:
    """How to run `model` on windows of `ids`: a function of the ids that its decoder reads, and those ids.

    For an encoder-decoder its encoder reads the first of the `halves` now; other models read `ids` whole.
    """
    if not has_two_stacks(model.config):
        return model, ids
    first, second = halves(model, ids)
    read = model.get_encoder()(input_ids=first)
    return lambda ids, **more: model(encoder_outputs=read, decoder_input_ids=ids, **more), second


def empty_cache(model: PreTrainedModel) -> dict[str, Any]:
    """The cache that `generate` begins with, as an argument of the forward; empty for a model with one stack."""
    if not has_two_stacks(model.config):
        return {}
    config = model.config.get_text_config(decoder=True)
    return {"past_key_values": EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))}


def stack_structure(model: PreTrainedModel, stack: Stack) -> Structure:
    """The structure of one stack of an encoder-decoder.

    Raises LyapunovPruneError for a model with one stack, one without a language head, or if the stack has no list of
    its layers.
    """
    if type(model) is not MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(model.config), None):
        what = "one stack of layers; leave out --stack"
        if has_two_stacks(model.config):
            what = "no language-model head; load it with AutoModelForSeq2SeqLM"
        raise LyapunovPruneError(f"{type(model).__name__} has {what}")
    module = model.get_encoder() if stack == "encoder" else model.get_decoder()
    within = next(name for name, each in model.named_modules() if each is module)
    config = stack_config(model, stack)
    return layers_in(model, config, _COUNTS[stack], backbone=BothStacks(model), within=within, stack=stack)


def structure_like(model: PreTrainedModel, structure: Structure) -> Structure:
    """`structure` in another model of its class, which keeps its layers at the same place."""
    layers = model.get_submodule(structure.layers_path)
    assert isinstance(layers, nn.ModuleList)
    backbone = backbone_of(model, structure.layers_path) if structure.stack is None else BothStacks(model)
    return replace(structure, backbone=backbone, layers=layers, config=stack_config(model, structure.stack))


def rebuilt(pruned: PreTrainedModel, config: Any) -> PreTrainedModel:
    """A model of the class of `pruned` and of `config`, on the meta device.

    Raises LyapunovPruneError if the class builds none, which the family's own code decides.
    """
    kind = type(pruned)
    what = f"these layers of {kind.__name__} cannot be removed correctly: the model cannot be built without them"
    with reported(what, "remove other layers", Exception), torch.device("meta"):
        fresh: PreTrainedModel = kind(config)
    return fresh


def renew_configs(model: PreTrainedModel) -> None:
    """Give every module the config that its class derives from `model.config`: T5's stacks hold copies of it.

    Raises LyapunovPruneError as `rebuilt`.
    """
    fresh = rebuilt(model, model.config)
    for name, module in model.named_modules():
        if "config" in vars(module):
            module.config = fresh.get_submodule(name).config


def stack_config(model: PreTrainedModel, stack: str | None) -> Any:
    """The config that counts the layers of a stack: a part of the model's (T5Gemma), or the model's own.

    For a model with one stack it is that of its text.
    """
    if stack is None:
        return model.config.get_text_config(decoder=True)
    part = getattr(model.config, stack, None)
    return part if isinstance(part, PreTrainedConfig) else model.config
