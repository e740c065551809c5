"""What a family needs for layer removal beyond the general rule, as one literal table.

The general rule (surgery.py) renumbers every `layer_idx`, slices every per-layer list of the config and
sets the layer count. An entry here says that the family passes the removal gate in the tests, and holds
only what the rule cannot know. A decoder without an entry has to pass the gate before it is handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Attributes of a module that hold the position of its layer.
POSITION_ATTRIBUTES = ("layer_idx", "layer_id")


@dataclass(frozen=True)
class Family:
    """`renumber(layer, old, new, config)` keeps a kept layer's function when its position changes."""

    renumber: Callable[[nn.Module, int, int, Any], None] | None = None


@torch.no_grad()
def _gpt2_inverse_layer_scaling(layer: nn.Module, old: int, new: int, config: Any) -> None:
    """With `scale_attn_by_inverse_layer_idx` the scores are divided by the layer's number.

    A reloaded layer divides by its new number, so the quotient moves into the queries.
    """
    if not config.scale_attn_by_inverse_layer_idx:
        return
    attention: Any = layer.attn
    width = attention.split_size
    attention.c_attn.weight[:, :width] *= (new + 1) / (old + 1)
    attention.c_attn.bias[:width] *= (new + 1) / (old + 1)
    attention.scaling *= (old + 1) / (new + 1)


FAMILIES: dict[str, Family] = {
    "gemma2": Family(),
    "gemma3_text": Family(),
    "gpt2": Family(renumber=_gpt2_inverse_layer_scaling),
    "gpt_neox": Family(),
    "llama": Family(),
    "mistral": Family(),
    "opt": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}
