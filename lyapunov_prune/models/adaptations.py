"""Exceptions of single families to the general rule of layer removal; `families.py` says which family needs which.

Each function that is given a `Cut` completes its config. If the family's checkpoint format cannot express the remaining
layers, it returns the reason and the remedy. `fold_` functions change weights of the layers that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lyapunov_prune.linalg import lift
from lyapunov_prune.models.sharing import own


class Cut(NamedTuple):
    """The `config` after the general rule, of which `kept` of the `layers` with config `before` are left.

    `outer` is the whole config that holds it. The layers are those of the original, which must not be changed.
    """

    outer: Any
    config: Any
    before: Any
    layers: nn.ModuleList
    kept: tuple[int, ...]


def fold_gpt2(layers: nn.ModuleList, kept: tuple[int, ...]) -> None:
    """GPT-2 with `scale_attn_by_inverse_layer_idx` divides attention scores by the layer's number plus one.

    A layer divides by its new number, so the queries are multiplied by new / old to compensate.
    """
    for new, old in enumerate(kept):
        attention: Any = layers[new].attn
        if not hasattr(attention, "c_attn"):  # a compact model may lack this attention
            continue
        own(attention)
        width = attention.split_size
        attention.c_attn.weight[:, :width] *= (new + 1) / (old + 1)
        attention.c_attn.bias[:width] *= (new + 1) / (old + 1)


def diffllama(cut: Cut) -> str | None:
    for new, old in enumerate(cut.kept):
        attention: Any = cut.layers[old].self_attn
        if new != old and not attention.lambda_k1.any():
            return f"layer {old} has lambda_k1 = 0, so its depth cannot be folded in; keep it"
    return None


def fold_diffllama(layers: nn.ModuleList, kept: tuple[int, ...]) -> None:
    """`λ = exp(q₁·k₁) − exp(q₂·k₂) + λ_init` and a factor `1 − λ_init`, where `λ_init` depends on the layer's position.

    When the position changes, exp(q₁·k₁) absorbs the change of λ_init, and the output projection that of the factor.
    """
    for new, old in enumerate(kept):
        attention: Any = layers[new].self_attn
        was, now = (0.8 - 0.6 * math.exp(-0.3 * i) for i in (old, new))
        q, k = lift(attention.lambda_q1), lift(attention.lambda_k1)
        score = q @ k
        own(attention)
        if new != old:
            step = torch.log(score.exp() + was - now) - score
            attention.lambda_q1.copy_(q + k * step / (k @ k))
        attention.o_proj.weight *= (1 - was) / (1 - now)


def attention_types(cut: Cut) -> None:
    """GPT-Neo's config repeats a pattern of attention types; write it out layer by layer."""
    cut.config.attention_types = [[[kind], 1] for kind in cut.config.attention_layers]


def block_types(cut: Cut) -> None:
    """RecurrentGemma's config repeats `block_types`; write it out layer by layer."""
    cycle = cut.before.block_types
    cut.config.block_types = [cycle[i % len(cycle)] for i in cut.kept]


def jamba(cut: Cut) -> str | None:
    return _set_period(cut, "attn_layer_period", "attn_layer_offset") or _set_period(
        cut, "expert_layer_period", "expert_layer_offset"
    )


def _set_period(cut: Cut, period: str, offset: str) -> str | None:
    """Find `period` and `offset` such that `i % period == offset` marks the same layers as before."""
    before, depth = cut.before, len(cut.kept)
    wanted = [i % getattr(before, period) == getattr(before, offset) for i in cut.kept]
    for p in range(1, depth + 2):
        for o in range(p):
            if [i % p == o for i in range(depth)] == wanted:
                setattr(cut.config, period, p)
                setattr(cut.config, offset, o)
                return None
    return _no_period(f"{period} and {offset}", wanted)


def _no_period(settings: str, wanted: list[bool]) -> str:
    marked = ", ".join(str(i) for i, yes in enumerate(wanted) if yes)
    return (
        f"by {settings} every n-th layer is of another kind, and {marked} of the {len(wanted)} remaining layers would "
        "be; remove whole periods, or only the last layers"
    )


def ernie_experts(cut: Cut) -> str | None:
    """Ernie has experts in every `moe_layer_interval`-th layer between a first and a last one; find all three anew."""
    before = cut.before
    last = before.moe_layer_end_index
    sparse = [(i + 1) % before.moe_layer_interval == 0 and before.moe_layer_start_index <= i <= last for i in cut.kept]
    marked = [i for i, yes in enumerate(sparse) if yes]
    config = cut.config
    config.moe_layer_start_index = marked[0] if marked else len(cut.kept)
    config.moe_layer_end_index = marked[-1] if marked else len(cut.kept) - 1
    for interval in range(1, len(cut.kept) + 2):
        if sparse == [
            (i + 1) % interval == 0 and config.moe_layer_start_index <= i <= config.moe_layer_end_index
            for i in range(len(cut.kept))
        ]:
            config.moe_layer_interval = interval
            return None
    return _no_period("moe_layer_interval", sparse)


def only_the_end(cut: Cut) -> str | None:
    if cut.kept == tuple(range(len(cut.kept))):
        return None
    return "this family scales the output of a layer by its number, which no checkpoint stores; remove only the last"


def first_has_attention(cut: Cut) -> str | None:
    """MiniMax reads the cache's length from the first layer; a linear attention there would not record it."""
    if cut.config.layer_types[0] == "full_attention":
        return None
    return (
        "this family counts positions in the cache of its first layer, which would have no attention; keep a layer "
        f"with full attention before layer {cut.kept[0]}"
    )


def residual_scale(cut: Cut) -> None:
    """MiniCPM multiplies each branch by `scale_depth / √layers`; change `scale_depth` so that the factor stays."""
    cut.config.scale_depth *= math.sqrt(len(cut.kept) / cut.before.num_hidden_layers)


def longcat(cut: Cut) -> None:
    """Each LongCat layer has two attentions, each with a cache; `num_hidden_layers` counts the caches."""
    cut.config.num_hidden_layers = 2 * len(cut.kept)


def ngram_layers(cut: Cut) -> str | None:
    """Qwen 4 numbers its layers with n-gram embeddings from 1 and sizes their tables by consecutive primes, in order.

    If the first of these layers are removed, the config starts at the prime of the first one kept. The multipliers of
    the hashes follow the same order, but are buffers in the checkpoint and need no change.
    """
    before = [i - 1 for i in cut.before.ple_layer_ids]
    left = [i for i in before if i in cut.kept]
    cut.config.ple_layer_ids = [cut.kept.index(i) + 1 for i in left]
    if not left:
        return None
    first = before.index(left[0])
    if left != before[first : first + len(left)]:
        gap = next(i for i in before[first:] if i not in left)
        layers = ", ".join(map(str, left))
        return f"the n-gram tables of layers {layers} have sizes that count those between them; keep layer {gap}"
    if first:
        table: Any = cut.layers[left[0]].get_submodule("ple.ple_embedding")
        cut.config.ngram_vocab_size_base = table.head_vocab_sizes[0]
    return None


def image_layers(cut: Cut) -> str | None:
    """Granite 4 Vision adds image features to the state before certain layers, which its outer config numbers.

    The features of a removed layer enter before the next kept layer.
    """
    outer = cut.outer
    if not hasattr(outer, "deepstack_layer_map"):  # a text model on its own
        return None
    levels = outer.deepstack_layer_map or []
    targets = [*(layer for _, layer in levels), *outer.spatial_target_layers]
    new = [sum(old < target for old in cut.kept) for target in targets]
    for target, at in zip(targets, new, strict=True):
        if at == len(cut.kept) or new.count(at) > 1:
            return f"image features enter before layer {target}, and no layer of their own is left; keep layer {target}"
    outer.deepstack_layer_map = [(level, at) for (level, _), at in zip(levels, new, strict=False)]
    outer.spatial_target_layers = new[len(levels) :]
    return None


def refused(reason: str) -> Callable[[Cut], str]:
    return lambda cut: f"no layer of this family can be removed alone: {reason}"


def has_linear_attention(cut: Cut) -> str | None:
    if "linear_attention" in cut.config.layer_types:
        return None
    linear = ", ".join(str(i) for i, kind in enumerate(cut.before.layer_types) if kind == "linear_attention")
    return f"without linear attention this family cannot be loaded; keep one of layers {linear}"
