"""Two paths of an error through attention: the value path (`Δv`) and the weight path (`Δα`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.forward.decoding import greedy_text
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.forward.logits import CACHE_LIMIT
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import InMemory, runs_models
from lyapunov_prune.models.structure import find_structure

_NAME = "lyapunov_prune_paths"
_SAME = 1e-4


@dataclass(frozen=True)
class AttentionPaths:
    """Difference of the attention output `o_t = Σ_i α_ti v_i` between two models that each decode their own text.

    With `Δ = compressed − dense`, `Δo = Σ α Δv + Σ Δα v + Σ Δα Δv` exactly: the value path, the weight path and their
    product. Arrays are (layers, steps) float64, means over prompts; norms are taken over all heads:

    - `value`, `weight`, `both`: norms of the three terms, relative to `‖o‖` of the dense model; `total`: `‖Δo‖ / ‖o‖`;
    - `prompt_weight`: share of the dense attention weights that falls on the prompt;
    - `prompt_share`: `‖Δo_P‖ / (‖Δo_P‖ + ‖Δo_G‖)`, with sums over the positions of the prompt (P, the same tokens for
      both models) and over the generated positions (G).

    `layers` are the indices of the layers whose attention both models have.

    Source: Demystifying When Pruning Works via Representation Hierarchies, eq. 64.
    """

    value: np.ndarray
    weight: np.ndarray
    both: np.ndarray
    total: np.ndarray
    prompt_weight: np.ndarray
    prompt_share: np.ndarray
    layers: tuple[int, ...]


@runs_models
def attention_paths(dense: InMemory, compressed: InMemory, prompts: Readable, *, steps: int) -> AttentionPaths:
    """Decode `steps` tokens greedily with both models from `prompts` and split `Δo`, see AttentionPaths.

    Each model then reads its own text twice without a cache: once as it is, and once through the eager attention of its
    family, whose output must agree. Sums are in float64.

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError when the models differ in
    their layers, when attention does not go through transformers' attention interface, or when its output is not the
    weighted sum of the values.
    """
    readings = [read(model, prompts, steps - 1) for model in (dense, compressed)]
    if readings[0].structure.num_layers != readings[1].structure.num_layers:
        raise LyapunovPruneError("the models have different layers; give a compressed model that keeps all of them")
    ids = readings[0].batch.ids
    decoded = [greedy_text(r, len(ids), steps) for r in readings]
    layers: tuple[int, ...] = ()
    rows = []
    for number, prompt in enumerate(ids):
        texts = [torch.cat([prompt.cpu(), tokens[number]])[None, :-1] for tokens in decoded]
        ours, theirs = (_attended(r, text, steps) for r, text in zip(readings, texts, strict=True))
        left = {layer for layer, _, _ in theirs}  # a compact model has attention in these alone
        ours = [each for each in ours if each[0] in left]
        if [(layer, v.shape) for layer, _, v in ours] != [(layer, v.shape) for layer, _, v in theirs]:
            raise LyapunovPruneError("the models have attention in different layers or heads")
        layers = tuple(layer for layer, _, _ in ours)
        pairs = zip(ours, theirs, strict=True)
        rows.append(torch.stack([_split(a, v, a2, v2, len(prompt)) for (_, a, v), (_, a2, v2) in pairs], 1))
    value, weight, both, total, prompt_weight, prompt_share = torch.stack(rows).mean(0).cpu().numpy()
    return AttentionPaths(value, weight, both, total, prompt_weight, prompt_share, layers)


def _split(a: torch.Tensor, v: torch.Tensor, a2: torch.Tensor, v2: torch.Tensor, prompt: int) -> torch.Tensor:
    """The six measures of one layer, (6, steps). Weights: heads × steps × positions; values: heads × positions × d."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum((0, 2)).sqrt()

    da, dv = a2 - a, v2 - v
    o = norm(a @ v)
    P, G = slice(0, prompt), slice(prompt, None)
    of_prompt, of_rest = (norm(a2[..., s] @ v2[:, s] - a[..., s] @ v[:, s]) for s in (P, G))
    all_of_it = of_prompt + of_rest
    share = torch.where(all_of_it > 0, of_prompt / all_of_it, torch.nan)
    return torch.stack(
        [
            *(norm(x) / o for x in (a @ dv, da @ v, da @ dv, a2 @ v2 - a @ v)),
            (a[..., P].sum(-1) / a.sum(-1)).mean(0),
            share,
        ]
    )


def _attended(reading: Reading, text: torch.Tensor, steps: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """For every attention layer: its index, the weights of the decoding positions and the values, float64."""
    model, structure = reading.model, reading.structure
    ids = text.to(model.device)
    own = final_state(structure, ids)
    with _recorded(model, steps) as seen:
        watched = final_state(structure, ids)
    require_finite(structure, ids, "a decoded text", own)
    same = bool(((watched - own).norm(dim=-1) <= CACHE_LIMIT[model.dtype] * own.norm(dim=-1)).all())
    wrong = {
        "does not use transformers' attention interface, so its weights cannot be read": not seen,
        "gives another output with its eager attention": not same,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{type(model).__name__} {why}; give another family")
    return seen


@contextmanager
def _recorded(model: PreTrainedModel, steps: int) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor]]]:
    """Run every forward inside the block through the eager attention of the family, and record it."""
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    # `layer_idx` of a compact model counts its caches, not its layers.
    places = {m: i for i, layer in enumerate(find_structure(model).layers) for m in layer.modules()}

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise LyapunovPruneError(f"{type(module).__name__} has no eager attention to record; give another family")
        output, weights = eager(module, query, key, value, *args, **kw)
        a, v = lift(weights[0, :, -steps:]), lift(value[0])
        v = v.repeat_interleave(len(a) // len(v), dim=0)
        wanted = lift(output[0, -steps:]).transpose(0, 1)
        close = max(_SAME, 4 * torch.finfo(output.dtype).eps) * float(wanted.abs().max())
        if a.shape[-1] != v.shape[1] or not torch.allclose(a @ v, wanted, rtol=0, atol=close):
            raise LyapunovPruneError(f"the output of {type(module).__name__} is not the weighted sum of its values")
        seen.append((places[module], a, v))
        return output, weights

    before, token = model.config._attn_implementation, _WATCHING.set(attend)
    try:
        model.set_attn_implementation(_NAME)
        yield seen
    finally:
        model.set_attn_implementation(before)
        _WATCHING.reset(token)


_WATCHING: ContextVar[Callable[..., Any]] = ContextVar("watching")
AttentionInterface.register(_NAME, lambda *args, **kwargs: _WATCHING.get()(*args, **kwargs))
# An attention without a registered mask gets none, and would not be causal.
AttentionMaskInterface.register(_NAME, eager_mask)
