"""The hidden channels of feed-forward blocks: their number, the setting that holds it, and removing some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.feedforward import FeedForward, find_feedforward
from lyapunov_prune.models.projections import Projection, structure_projections
from lyapunov_prune.models.roles import role
from lyapunov_prune.models.structure import Structure

# Config names for the number of hidden channels. If the setting is None, the family computes the number.
SETTINGS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim")
_REMEDY = "remove whole layers instead"


def find_blocks(structure: Structure) -> tuple[FeedForward, ...]:
    """The feed-forward block of every layer, in order.

    Raises LyapunovPruneError, with the reason, for experts, for a layer whose block `find_feedforward` does not
    recognise, for blocks of different widths, and if the config has no setting for the width.
    """
    inside = len(structure.layers_path.split(".")) + 1
    for p in structure_projections(structure):
        several = role(p.component).startswith("mlp") and any(d.isdigit() for d in p.module.split(".")[inside:])
        if p.expert is not None or several:
            raise LyapunovPruneError(
                f"layer {p.layer} has experts ({p.name}), and width is the channels of one dense block a layer; give "
                "--what experts, or remove whole layers"
            )
    try:
        blocks = tuple(find_feedforward(structure, layer) for layer in range(structure.num_layers))
    except LyapunovPruneError as error:
        reason = error.message.rpartition("; ")[0]
        raise LyapunovPruneError(f"channels leave the block of every layer, and {reason}; {_REMEDY}") from None
    _settings(structure, width_of(structure, blocks))
    return blocks


def width_of(structure: Structure, blocks: Sequence[FeedForward]) -> int:
    """The number of hidden channels of every block; raises LyapunovPruneError if the blocks differ."""
    widths = [b.out.weight(layer).shape[1] for b, layer in zip(blocks, structure.layers, strict=True)]
    if len(set(widths)) > 1:
        raise LyapunovPruneError(
            f"the feed-forward blocks have {min(widths)} to {max(widths)} channels, and the same number leaves each; "
            f"{_REMEDY}"
        )
    return widths[0]


def last_matrices(structure: Structure, blocks: Sequence[FeedForward]) -> list[Projection]:
    """The last matrix of every block, by its path in the model."""
    paths = [f"{structure.layers_path}.{b.layer}.{b.out.module}" for b in blocks]
    return [replace(b.out, module=path, name=path) for b, path in zip(blocks, paths, strict=True)]


def _settings(structure: Structure, width: int) -> list[str]:
    """The settings equal to `width`; if there are none, those that are None."""
    told = {name: getattr(structure.config, name) for name in SETTINGS if hasattr(structure.config, name)}
    for value in (width, None):
        if names := [name for name in told if told[name] == value]:
            return names
    raise LyapunovPruneError(
        f"the config of {structure.model_type} has no setting that is the width of the feed-forward blocks, {width}; "
        f"{_REMEDY}"
    )


@torch.no_grad()
def narrow(model: PreTrainedModel, structure: Structure, blocks: Sequence[FeedForward], kept: torch.Tensor) -> None:
    """Keep only the hidden channels `kept` (layers × channels, ascending) of each of `blocks`, in place.

    `structure` is that of `model`. Parameters are replaced by new ones, so memory shared with another model is not
    written to.
    """
    width, left = width_of(structure, blocks), kept.shape[1]
    settings = _settings(structure, width)
    for block, layer, channels in zip(blocks, structure.layers, kept, strict=True):
        into: dict[str, list[Projection]] = {}
        for p in (block.gate, block.up):
            if p is not None:
                into.setdefault(p.module, []).append(p)
        for path, parts in into.items():
            # A fused matrix holds the channels twice: for the gate, and for the other factor.
            rows = torch.cat([p.start + channels for p in sorted(parts, key=lambda p: p.start)])
            module = layer.get_submodule(path)
            _select(module, "weight", rows, axis=1 if parts[0].transposed else 0)
            if getattr(module, "bias", None) is not None:
                _select(module, "bias", rows, axis=0)
        _select(layer.get_submodule(block.out.module), "weight", channels, axis=0 if block.out.transposed else 1)
        for path in {"", block.block}:  # OPT's and GPT BigCode's layer and Llama's block store the width as well
            noted = vars(layer.get_submodule(path))
            noted.update({key: left for key in (*SETTINGS, "inner_dim") if noted.get(key) == width})
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in (structure.config, *configs.values()):
        for name in settings if type(config) is type(structure.config) else ():
            setattr(config, name, left)


def _select(module: nn.Module, name: str, index: torch.Tensor, axis: int) -> None:
    old: Any = getattr(module, name)
    new = old.detach().index_select(axis, index.to(old.device)).contiguous()
    setattr(module, name, nn.Parameter(new, old.requires_grad))
    if new.ndim == 2:
        sizes = ("nx", "nf") if isinstance(module, Conv1D) else ("out_features", "in_features")
        for size, number in zip(sizes, new.shape, strict=True):
            setattr(module, size, number)
