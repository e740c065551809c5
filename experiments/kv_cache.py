"""A model with rounded keys and values, as a cache of few bits holds them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, InMemory, takes_model, wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.roles import role

CacheBits = Literal[8, 4, 2]


@takes_model
def with_rounded_cache(model: InMemory, bits: CacheBits) -> Decoder:
    """A copy of `model` that shares its weights and rounds keys and values to `bits`; `explain` compares the two.

    The vector `x` of one token and one head (`head_dim` values) is rounded on its own asymmetric grid,

    `s = (max x − min x) / (2^bits − 1)`, `x̂ = s · round((x − min x) / s) + min x`,

    the grid of KIVI (Liu et al. 2024, arXiv:2402.02750) and of transformers' `QuantizedCache`. Values are rounded per
    token, as there. Keys are rounded per token too, whereas KIVI rounds a channel over a group of tokens; thus no
    token's grid depends on later tokens. Both are rounded when they leave their projections, keys before rotary
    positions (and before a norm of keys). Every token attends to rounded keys and values, including its own, as in
    decoding without a window of full precision.

    Raises LyapunovPruneError for other bits, and if no layer has matrices that are known to make keys and values
    (latent attention, state spaces).
    """
    held = [p for p in find_projections(model) if role(p.component) in ("key", "value") and p.expert is None]
    if not held:
        raise LyapunovPruneError(
            f"no matrices of {type(model.model).__name__} are known to make its keys and values; this decoder is not "
            "supported"
        )
    shared = {id(tensor): tensor for tensor in chain(model.model.parameters(), model.model.buffers())}
    changed = copy.deepcopy(model.model, shared)
    changed.config._name_or_path = f"{model.model.config._name_or_path or type(changed).__name__}, cache of {bits} bits"
    config: Any = model.structure.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    modules = dict.fromkeys(p.module for p in held)
    for m in modules:
        hook = partial(_round, [p for p in held if p.module == m], size, bits)
        changed.get_submodule(m).register_forward_hook(hook)
    return wrap(changed, model.tokenizer)


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` (… × n) rounded to asymmetric grids of `2^bits` points, one per row, in its own dtype."""
    wide = x.float() if x.dtype != torch.float64 else x
    low, high = wide.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    step = torch.where(step > 0, step, torch.ones_like(step))  # a constant row is its own minimum
    return (((wide - low) / step).round() * step + low).to(x.dtype)


def _round(
    parts: Sequence[Projection], size: int, bits: int, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    output = output.clone()
    for p in parts:
        part = output[..., p.start : p.stop]
        width = size if (p.stop - p.start) % size == 0 else p.stop - p.start
        part.copy_(rounded(part.unflatten(-1, (-1, width)), bits).flatten(-2))
    return output
