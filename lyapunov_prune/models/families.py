"""What a family needs for layer removal beyond the general rule, as one literal table.

The general rule renumbers every `layer_idx` (surgery.py) and slices everything in the config that speaks
of single layers (layer_settings.py). An entry here holds only what the rule cannot know; most families
need none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lyapunov_prune.models import adaptations as adapt
from lyapunov_prune.models.adaptations import Cut

# Attributes of a module that hold the position of its layer, and the number of layers.
POSITION_ATTRIBUTES = ("layer_idx", "layer_id", "layer_number")
DEPTH_ATTRIBUTES = ("num_hidden_layers",)

# Families of which the tests put every kind through the gate: they are handed out without it. Every other
# decoder has to pass it before.
TRUSTED = frozenset({"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3"})


@dataclass(frozen=True)
class Family:
    """`adapt(cut)` finishes the removal or raises LyapunovPruneError with the reason.

    `tables` names modules outside the layers whose weight holds one block a layer, and the axis of the
    blocks. `leaves(layers, config, removed)` gives parameters of kept layers that leave with removed ones.
    """

    adapt: Callable[[Cut], None] | None = None
    tables: tuple[tuple[str, int], ...] = ()
    leaves: Callable[[nn.ModuleList, Any, tuple[int, ...]], list[nn.Parameter]] | None = None


_PER_LAYER_INPUTS = (("embed_tokens_per_layer", 1), ("per_layer_model_projection", 0))
FAMILIES: dict[str, Family] = {
    "beam": Family(adapt=adapt.only_the_end),
    "big_bird": Family(adapt=adapt.random_blocks),
    "diffllama": Family(adapt=adapt.diffllama),
    "ernie4_5_moe": Family(adapt=adapt.ernie_experts),
    "gemma3n_text": Family(adapt=adapt.shared_keys, tables=_PER_LAYER_INPUTS),
    "gemma4_text": Family(adapt=adapt.gemma4, tables=_PER_LAYER_INPUTS),
    "gemma4_unified_text": Family(adapt=adapt.gemma4),
    "glm_moe_dsa": Family(adapt=adapt.shared_index),
    "gpt2": Family(adapt=adapt.gpt2),
    "gpt_neo": Family(adapt=adapt.attention_types),
    "gpt_neox_japanese": Family(adapt=adapt.last_layer_stays),
    "hy_v4": Family(adapt=adapt.shared_index),
    "inkling2_text": Family(adapt=adapt.refused("every block of layers reads the outputs of all blocks before it")),
    "jamba": Family(adapt=adapt.jamba),
    "longcat_flash": Family(adapt=adapt.longcat),
    "minicpm3": Family(adapt=adapt.residual_scale),
    "minimax": Family(adapt=adapt.first_has_attention),
    "modernbert-decoder": Family(adapt=adapt.first_layer_stays("has no norm before its attention")),
    "olmo_hybrid": Family(adapt=adapt.has_linear_attention),
    "qwen4_exp_text": Family(adapt=adapt.ngram_layers),
    "recurrent_gemma": Family(adapt=adapt.block_types),
    "zamba": Family(adapt=adapt.zamba),
    "zamba2": Family(adapt=adapt.zamba2, leaves=adapt.zamba2_leaves),
    "zaya": Family(adapt=adapt.zaya, leaves=adapt.zaya_leaves),
}
