"""How changing one layer moves the hidden state, the logits and the probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.arguments import SOME, Count, Positive
from lyapunov_prune.bounds.probability import kl_softmax_le_range, kl_softmax_le_variance, variance_bound
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.anatomy import between_branches
from lyapunov_prune.forward.changes import WHAT, What, compact_layers, compressed_layers, dropped_layers
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.decoding import greedy_text
from lyapunov_prune.forward.hooks import layer_input, require_finite, residual_stream, run_backbone
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.positions import stretches
from lyapunov_prune.models.structure import Structure, identify
from lyapunov_prune.predictions.hierarchy_probe import HierarchyProbe
from lyapunov_prune.predictions.spaces import (
    HIDDEN,
    LOGITS,
    PROBABILITIES,
    prediction_blocks,
    prediction_measures,
    turn,
)
from lyapunov_prune.progress import track
from lyapunov_prune.results.result import MeasuredOn

# Error bounds of the second-order estimates of the angles are derived in docs/remainders.md (not proven in Lean).
# Relative rounding of the computed angle and of the bound, a few float64 operations each.
ROUNDING = 1e-9


def angle_bounds(parallel: np.ndarray, orthogonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `1 − cos(v, v + Δ)` from `a = ‖Δ∥‖/‖v‖ < 1` and `b = ‖Δ⊥‖/‖v‖`; NaN where `a ≥ 1`.

    `1 − cos = 1 − (1 + t²)^(−1/2)` with `t = b/(1 ± a)` lies between `t²/2 − 3t⁴/8` and `t²/2`. The sign of ±a is
    unknown, so both bounds take the worse one: `max(0, b²/(2(1 + a)²) (1 − 3b²/(4(1 + a)²)))` and `b²/(2(1 − a)²)`.
    Both approach the estimate `b²/2` of Theorem 1 as `a` and `b` go to 0.
    """
    near, far = (np.where(parallel < 1, b, np.nan) for b in (1 - parallel, 1 + parallel))
    with np.errstate(divide="ignore", invalid="ignore"):
        small, large = (orthogonal / far) ** 2, (orthogonal / near) ** 2
    # t²/2 − 3t⁴/8 increases up to t² = 2/3, and the angle increases with t.
    least = np.minimum(small, 2 / 3)
    return least / 2 * (1 - 3 * least / 4), large / 2


def probability_angle_bounds(variance: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `1 − cos(p, q)` from `V = Var_r(d)` and `c = max |d − E_r d|`, `r_i = p_i²/‖p‖²`.

    `cos(p, q) = E_r[e^d] / sqrt(E_r[e^(2d)])` exactly, so `1 − cos = 1 − sqrt(1 − w)`, where `w` is the variance of
    `e^d` under r divided by its second moment, and `e^(−2c) V ≤ w ≤ e^c (sinh c / c)² V`. The lower bound is half of
    the lower end of w; the upper bound is `1 − sqrt(1 − w)` at its upper end, at most 1. Both approach the estimate
    `V/2` of Theorem 2 as c goes to 0.
    """
    c = np.maximum(deviation, 1e-6)  # a larger c keeps the bound valid and avoids cancellation
    with np.errstate(divide="ignore"):
        stretch = c + np.log(-np.expm1(-2 * c) / (2 * c))  # log(sinh c / c) without overflow
        w = np.exp(np.minimum(0.0, c + 2 * stretch + np.log(variance)))
    return np.exp(-2 * deviation) * variance / 2, w / (1 + np.sqrt(1 - w))


_MEASURES = (*HIDDEN, *LOGITS, *PROBABILITIES)


@runs_model
def probe_layers(
    model: InMemory,
    prompts: Readable,
    *,
    change: Literal["dropped"] | PreTrainedModel = "dropped",
    steps: Count = 32,
    what: Annotated[Sequence[What], SOME] = WHAT,
    temperature: Positive = 1.0,
    read_at: ReadAt = "layer",
    final_norm: bool = True,
    batch_size: Count = 1,
    written: torch.Tensor | None = None,
) -> HierarchyProbe:
    """Change each layer of `model` in turn and measure `HierarchyProbe` while it decodes from `prompts`.

    The dense model continues each prompt (windows × tokens) greedily by `steps` tokens, or takes `written`, the result
    of `forward.decoding.greedy_text`. One forward over the text gives the input of every layer (two if position
    encodings depend on the length). Then each layer runs changed on that text: left out, with the matrices of a
    compressed model of the same shapes (`compress(...).model`), or as in a compact model. `what` names the change: the
    whole `layer`, its `attention` or its `mlp`. The state is read at the end of the layer, or with `read_at="branch"`
    at the end of the changed sublayer (after attention and before the MLP, for example).

    Cost: for each layer and change, one forward of that layer and the head on `steps` states. Memory: L × `batch_size`
    × (tokens + steps) × width, and one tile of tokens × vocabulary. The bounds hold for the computed logits in any
    dtype; changes near its rounding are noise.

    Raises NonFiniteError naming the layer when the dense model is not finite, and LyapunovPruneError for ids outside
    the vocabulary, prompts and steps longer than the context, a temperature that is not above 0, a decoder whose logits
    are not a function of its final state, a compressed model that differs in more than matrices, and `read_at="branch"`
    for layers whose sublayers run in parallel.
    """
    reading = read(model, prompts, steps - 1)
    batch, structure = reading.batch, reading.structure
    text = greedy_text(reading, batch_size, steps, written)
    prefix, scorer = reading.prefix, reading.scorer
    if structure.num_layers not in prefix.entries:
        require_finite(structure, reading.windows(1)[0], batch.text)
        kind = type(reading.model).__name__
        raise LyapunovPruneError(
            f"the head of {kind} reads more than the output of its last layer; give another decoder"
        )
    if isinstance(change, PreTrainedModel):
        changes = (compact_layers if is_compact(change) else compressed_layers)(reading, change)
    else:
        changes = dropped_layers(reading)
    behind: dict[int, tuple[str, nn.Module]] = {}
    if read_at == "branch":
        behind = between_branches(reading.decoder, reading.anatomy, "; read at the layer")

    def probe(begun: int, given: torch.Tensor) -> torch.Tensor:
        """The measures of these prompts: changes × layers × measures × prompts × steps."""
        values = torch.full(
            (len(what), structure.num_layers, len(_MEASURES), len(given), steps), torch.nan, dtype=torch.float64
        )
        whole = torch.cat([given, text[begun : begun + len(given)].to(given)], dim=1)
        places = list(itertools.product(_parts(structure, given.shape[1], steps), range(structure.num_layers)))
        for (at, length), layer in track(places, "hierarchy probe") if len(given) == len(batch) else places:
            ids, count = whole[:, :length], at.stop - at.start
            if layer == 0:
                states, between = dense_states(prefix, ids, batch.text, {i: entry for i, (_, entry) in behind.items()})
            first, entry = behind.get(layer, ("", None))
            for place in (None, entry) if first in what else (None,):
                read_here = [i for i, part in enumerate(what) if (part == first) == (place is not None)]
                have = [(i, changed) for i in read_here if (changed := changes(layer, what[i])) is not None]
                if not have:
                    continue
                dense = states[layer + 1] if place is None else between[layer]
                outputs = [changed_state(prefix, ids, states, layer, changed, place) for _, changed in have]
                ends = [h[:, -count:] for h in (dense, *outputs)]
                normed = [prefix.finish(ids[:, -count:], structure.num_layers, h) for h in ends] if final_norm else ends
                measures = _compare(scorer, ends, normed, temperature)
                for (i, _), m in zip(have, measures, strict=True):
                    values[i, layer, :, :, at] = m.view(len(_MEASURES), len(ids), count).cpu()
        return values

    values = torch.cat(dealt(reading, batch_size, probe, "hierarchy probe"), dim=3)
    found = _result(tuple(what), values.numpy(), temperature, change, reading.measured_on())
    return replace(found, read_at=read_at, final_norm=final_norm)


def _parts(structure: Structure, prompt: int, steps: int) -> list[tuple[slice, int]]:
    """Steps that one forward can handle, and the length of its text: all at once unless position encodings change."""
    parts = stretches(structure.config, prompt, prompt + steps - 1)
    return [(slice(first - prompt, last - prompt + 1), last) for first, last in parts]


def _compare(
    scorer: Scorer, states: list[torch.Tensor], normed: list[torch.Tensor], temperature: float
) -> list[torch.Tensor]:
    """The measures of every changed state against the dense one, which is the first, each (measures, rows).

    `states` are windows × steps × width, and `normed` the same as the head reads them.
    """
    h, *changed = (state.flatten(0, 1) for state in states)
    read, *others = (state.flatten(0, 1) for state in normed)
    parts: list[list[torch.Tensor]] = [[] for _ in changed]
    for number, (z, log_p), (z2, log_q) in prediction_blocks(scorer, read, others, temperature):
        parts[number].append(torch.cat([turn(z, z2), prediction_measures(log_p, log_q)]))
    return [
        torch.cat([turn(h, h2).to(blocks[0].device), torch.cat(blocks, dim=-1)])
        for h2, blocks in zip(changed, parts, strict=True)
    ]


def _result(
    parts: tuple[str, ...],
    values: np.ndarray,
    temperature: float,
    change: Literal["dropped"] | PreTrainedModel,
    measured_on: MeasuredOn,
) -> HierarchyProbe:
    """Average over prompts and check every bound; `values` is parts × layers × measures × prompts × steps."""
    values[~np.isfinite(values).all(2, keepdims=True).repeat(values.shape[2], 2)] = np.nan
    of = dict(zip(_MEASURES, np.moveaxis(values, 2, 0), strict=True))
    of["range_bound"] = of.pop("span")
    variance, deviation = 2 * of["kl_estimate"], of.pop("deviation")
    of["variance_bound"] = variance_bound(variance, deviation)
    deviation_r = of.pop("deviation_r")
    of["hidden_bound"], of["logit_bound"] = (
        angle_bounds(of[f"{space}_parallel"], of[f"{space}_orthogonal"])[1] for space in ("hidden", "logit")
    )
    of["probability_bound"] = probability_angle_bounds(2 * of["probability_estimate"], deviation_r)[1]
    angles = [(of[space], of[f"{space}_bound"]) for space in ("hidden", "logit", "probability")]
    checked, violations = 0, []
    for i, layer in np.ndindex(values.shape[:2]):
        kl, span, V, c = (x[i, layer].ravel() for x in (of["kl"], of["range_bound"], variance, deviation))
        at, near = np.isfinite(kl), np.isfinite(kl) & (c <= 1)
        checks = []
        if at.any():
            checks.append(kl_softmax_le_range(kl[at], span[at], matrix=f"{parts[i]} of layer {layer}", layer=layer))
        if near.any():
            name = f"{parts[i]} of layer {layer}"
            checks.append(kl_softmax_le_variance(kl[near], V[near], c[near], matrix=name, layer=layer))
        checked += sum(check.inputs for check in checks)
        violations += [check for check in checks if not check.holds]
    return HierarchyProbe(
        what=parts,
        compressed=identify(change) if isinstance(change, PreTrainedModel) else None,
        **{name: measured.mean(-2) for name, measured in of.items()},
        deviation=deviation.max(-2),
        deviation_r=deviation_r.max(-2),
        temperature=float(temperature),
        checked=checked,
        violations=tuple(violations),
        derived=sum(int(np.isfinite(bound).sum()) for _, bound in angles),
        exceeded=sum(int((angle > bound * (1 + ROUNDING)).sum()) for angle, bound in angles),
        measured_on=measured_on,
    )


ReadAt = Literal["layer", "branch"]


def dense_states(
    prefix: Prefix, ids: torch.Tensor, text: str, places: dict[int, nn.Module]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """The dense state at every layer boundary (windows × tokens × width), and the input of each of `places`."""
    states: list[torch.Tensor] = []
    with ExitStack() as stack:
        between = {layer: stack.enter_context(_entering(module, ids)) for layer, module in places.items()}
        stack.enter_context(residual_stream(prefix.structure, lambda boundary, hidden: states.append(hidden)))
        run_backbone(prefix.structure, ids)
    require_finite(prefix.structure, ids, text, states[-1])
    return states, {layer: found[-1] for layer, found in between.items()}


def changed_state(
    prefix: Prefix,
    ids: torch.Tensor,
    states: list[torch.Tensor],
    layer: int,
    change: AbstractContextManager[None],
    place: nn.Module | None,
) -> torch.Tensor:
    """The output of `layer` (or the input of `place`) when the layer runs changed on its dense input."""
    with ExitStack() as stack:
        entering = None if place is None else stack.enter_context(_entering(place, ids))
        stack.enter_context(change)
        start = prefix.entry(layer)
        end = prefix.advance(ids, start, states[start], layer + 1)
    return end if entering is None else entering[-1]


@contextmanager
def _entering(module: nn.Module, ids: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Record the inputs (windows × tokens × width) of `module` inside the block."""
    found: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(layer_input(args, kwargs).view(*ids.shape, -1))  # OPT flattens all tokens into one row

    with hooked(before=[(module, note)]):
        yield found
