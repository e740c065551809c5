"""The two paths by which an error enters attention: the values that are averaged, and the weights that average them."""

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

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.decoding import greedy_text
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.forward.logits import CACHE_LIMIT  # of two ways to compute the same, by other kernels
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.positions import stretches
from lyapunov_prune.models.structure import find_structure, identify, in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result

_NAME = "lyapunov_prune_paths"
_SAME = 1e-4
_OTHERS = "the models attend in other layers, or with other heads; give a compressed model that keeps all layers"


@dataclass(frozen=True)
class AttentionPaths(Result):
    """How the output of attention, `o_t = Σ_i α_ti v_i` over all heads, differs between two models that each decode.

    With `Δ` compressed less dense, exactly `Δo = Σ α Δv + Σ Δα v + Σ Δα Δv`: the value path, the weight path, and what
    both make together (Demystifying When Pruning Works via Representation Hierarchies, eq. 64). (layers, steps)
    float64, means over prompts, norms over all heads:

    - `value`, `weight`, `both`: the norms of the three terms over `‖o‖` of the dense model; `total`: `‖Δo‖ / ‖o‖`;
    - `prompt_weight`: the share of the dense `α` that falls on the prompt, the rest on what was generated;
    - `prompt_share`: `‖Δo_P‖ / (‖Δo_P‖ + ‖Δo_G‖)`, where the sums run over the positions of the prompt (the same tokens
      for both) or over what each model has generated.

    `layers` are those whose attention was seen, of a compact model those that still have one.
    """

    value: np.ndarray
    weight: np.ndarray
    both: np.ndarray
    total: np.ndarray
    prompt_weight: np.ndarray
    prompt_share: np.ndarray
    layers: tuple[int, ...]
    compressed: ModelIdentity
    measured_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        names = ("value", "weight", "both", "total", "prompt_weight", "prompt_share")
        steps = self.value.shape[-1]
        index = {"layer": np.repeat(self.layers, steps), "step": np.tile(np.arange(steps), len(self.layers))}
        return pd.DataFrame({**index, **{name: getattr(self, name).ravel() for name in names}})

    def summary(self) -> pd.DataFrame:
        """Means over the steps, a row a layer."""
        return self.to_frame().drop(columns="step").groupby("layer", sort=False).mean().reset_index()

    def headline(self) -> str:
        return (
            f"Paths of the error through attention, {self.value.shape[-1]} decoding steps, against "
            f"{self.compressed.name}; norms relative to the dense output\n{self.measured_on.line()}"
        )


@checked
@in_eval_mode
@torch.no_grad()
def attention_paths(
    dense: PreTrainedModel,
    compressed: PreTrainedModel,
    prompts: Readable,
    *,
    steps: int,
    written: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> AttentionPaths:
    """Let both models decode `steps` tokens greedily from `prompts`, each from its own tokens, and split `Δo`.

    Texts that both have `written` before, what `forward.decoding.greedy_text` gives for them, are not decoded again.
    Each model then reads its own text twice, uncached: as it is, and through its family's own eager attention, which
    must compute the same; in two parts where positions change by length. Memory: the caches of all prompts, then the
    weights of `steps` positions and the values of all, of every layer and one prompt. Sums in float64.

    Raises NonFiniteError naming the layer when a model is not finite, and LyapunovPruneError for models with other
    layers, and for attention that transformers' attention interface does not reach or that is no such sum.
    """
    if steps < 1:
        raise LyapunovPruneError(f"{steps} decoding steps are none; give 1 or more")
    readings = [read(model, prompts) for model in (dense, compressed)]
    batch = readings[0].batch
    if readings[0].structure.num_layers != readings[1].structure.num_layers:
        raise LyapunovPruneError(_OTHERS)
    known = written or (None, None)
    decoded = [greedy_text(r, steps, len(batch), text) for r, text in zip(readings, known, strict=True)]
    rows: list[torch.Tensor] = []
    layers: tuple[int, ...] = ()
    prompts_alone = [ids[0].cpu() for ids in batch.windows(1)]
    texts = [[torch.cat(pair) for pair in zip(prompts_alone, tokens, strict=True)] for tokens in decoded]
    for each in track(list(zip(*texts, strict=True)), "attention paths"):
        prompt, parts = len(each[0]) - steps, []
        for first, last in stretches(readings[0].structure.config, prompt, len(each[0]) - 1):
            count = last - first + 1
            ours, theirs = (_attended(r, text[None, :last], count) for r, text in zip(readings, each, strict=True))
            left = {layer for layer, _, _ in theirs}  # of a compact model the attention of others is gone
            ours = [each for each in ours if each[0] in left]
            shapes = [[(layer, v.shape) for layer, _, v in seen] for seen in (ours, theirs)]
            if shapes[0] != shapes[1]:
                raise LyapunovPruneError(_OTHERS)
            layers = tuple(layer for layer, _, _ in ours)
            # Layers, and the two models, may be on several devices.
            pairs = [((a, v), (a2.to(a), v2.to(v))) for (_, a, v), (_, a2, v2) in zip(ours, theirs, strict=True)]
            parts.append(torch.stack([_split(*one, *other, prompt).cpu() for one, other in pairs], 1))
        rows.append(torch.cat(parts, -1))
    value, weight, both, total, prompt_weight, prompt_share = torch.stack(rows).mean(0).numpy()
    return AttentionPaths(
        value, weight, both, total, prompt_weight, prompt_share, layers, identify(compressed), readings[0].measured_on()
    )


def _split(a: torch.Tensor, v: torch.Tensor, a2: torch.Tensor, v2: torch.Tensor, prompt: int) -> torch.Tensor:
    """The six measures of one layer, 6 × steps: weights are heads × steps × positions, values heads × positions × d."""

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
    """Of every attention of the model over its own text: layer, weights of the decoding positions, values; float64."""
    model, structure = reading.model, reading.structure
    ids = text.to(model.device)
    own = final_state(structure, ids)
    with _recorded(model, steps) as seen:
        watched = final_state(structure, ids)
    if not own.isfinite().all():
        require_finite(structure, ids, "a decoded text")
    if not seen:
        raise LyapunovPruneError(
            f"{type(model).__name__} does not call transformers' attention interface; its weights cannot be seen"
        )
    if not bool(((watched - own).norm(dim=-1) <= CACHE_LIMIT[model.dtype] * own.norm(dim=-1)).all()):
        raise LyapunovPruneError(f"{type(model).__name__} computes something else by its eager attention")
    return seen


@contextmanager
def _recorded(model: PreTrainedModel, steps: int) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor]]]:
    """Every forward inside the block attends by the family's own eager function, which is watched."""
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    # By place: `layer_idx` of a compact model goes by its caches.
    places = {m: i for i, layer in enumerate(find_structure(model).layers) for m in layer.modules()}

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise LyapunovPruneError(
                f"{type(module).__name__} has no eager attention to be watched; give another family"
            )
        output, weights = eager(module, query, key, value, *args, **kw)
        a, v = lift(weights[0, :, -steps:]), lift(value[0])
        v = v.repeat_interleave(len(a) // len(v), dim=0)
        wanted = lift(output[0, -steps:]).transpose(0, 1)
        close = max(_SAME, 4 * torch.finfo(output.dtype).eps) * float(wanted.abs().max())
        if a.shape[-1] != v.shape[1] or not torch.allclose(a @ v, wanted, rtol=0, atol=close):
            raise LyapunovPruneError(f"the output of {type(module).__name__} is no weighted sum of its values")
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
# Without a mask of its own name a forward has none, and looks ahead.
AttentionMaskInterface.register(_NAME, eager_mask)
