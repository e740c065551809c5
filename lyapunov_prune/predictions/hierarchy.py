"""How changing one layer moves the hidden state, the logits and the probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, Positive
from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.probability import kl_softmax_le_range, kl_softmax_le_variance, variance_bound
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.changes import WHAT, What, compact_layers, compressed_layers, dropped_layers
from lyapunov_prune.forward.decoding import greedy_text
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.scoring import Scorer
from lyapunov_prune.forward.sublayers import between_branches
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import InMemory, takes_model
from lyapunov_prune.models.positions import stretches
from lyapunov_prune.models.structure import Structure, identify, in_eval_mode
from lyapunov_prune.predictions.exits import ReadAt, changed_state, dense_states
from lyapunov_prune.predictions.remainders import ROUNDING, angle_bounds, probability_angle_bounds
from lyapunov_prune.predictions.softmax import prediction_blocks
from lyapunov_prune.predictions.spaces import HIDDEN, LOGITS, PROBABILITIES, prediction_measures, turn
from lyapunov_prune.progress import track
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result
from lyapunov_prune.results.wording import bars

_MEASURES = (*HIDDEN, *LOGITS, *PROBABILITIES)


@dataclass(frozen=True)
class HierarchyProbe(Result):
    """Effect of changing one layer on `h → z = W_lm norm(h) → p = softmax(z/T)` at every decoding step.

    Arrays are (len(what), L, steps) float64, means over prompts. `what` lists what was changed: the whole layer, its
    attention or its MLP. `h` is the output of the changed layer, or of the changed sublayer before the other one runs
    (`read_at`); everything before it is dense. The final norm (skipped without `final_norm`) and the head are applied
    to `h` directly. With `Δ` the change of h or z, `d = Δz/T` and `q` the changed probabilities:

    - `hidden`, `logit`, `probability`: `1 − cos` between the dense and the changed h, z, p;
    - `hidden_parallel`, `hidden_orthogonal`, and the same for `logit`: `‖Δ∥‖/‖v‖` and `‖Δ⊥‖/‖v‖` with v = h or z;
    - `hidden_estimate`, `logit_estimate`: `‖Δ⊥‖²/(2‖v‖²)`; `probability_estimate`: `Var_r(d)/2`, `r_i = p_i²/‖p‖²`;
    - `kl = KL(p‖q)`, `reverse_kl = KL(q‖p)`, in nats, and `kl_estimate = Var_p(d)/2`;
    - `range_bound = max d − min d` and `variance_bound = (1/2 + 2c/9) Var_p(d)`, upper bounds of `kl` proven in
      `lean/`; the second is NaN unless `c = max |d − E_p d| ≤ 1` for every prompt. `deviation` is the largest c over
      prompts;
    - `uniform_variance`: variance of d over the vocabulary with equal weights (Figure 19);
    - `hidden_bound`, `logit_bound`, `probability_bound`: upper bounds of the angles, derived in docs/remainders.md but
      not proven in Lean. The first two are NaN unless `‖Δ∥‖ < ‖v‖` for every prompt; the third uses `Var_r(d)` and
      `deviation_r`, the largest `|d − E_r d|` over prompts. `derived` angles were compared with them, and `exceeded` of
      them were larger.

    All are NaN where a layer has no such sublayer, or where the change makes the logits infinite or NaN.

    Source: Demystifying When Pruning Works via Representation Hierarchies, §5 and §6, which reads h after the sublayer.
    """

    what: tuple[str, ...]
    compressed: ModelIdentity | None  # None: the layer or sublayer is left out
    hidden: np.ndarray
    hidden_estimate: np.ndarray
    hidden_parallel: np.ndarray
    hidden_orthogonal: np.ndarray
    logit: np.ndarray
    logit_estimate: np.ndarray
    logit_parallel: np.ndarray
    logit_orthogonal: np.ndarray
    probability: np.ndarray
    probability_estimate: np.ndarray
    kl: np.ndarray
    reverse_kl: np.ndarray
    kl_estimate: np.ndarray
    range_bound: np.ndarray
    variance_bound: np.ndarray
    deviation: np.ndarray
    deviation_r: np.ndarray
    uniform_variance: np.ndarray
    hidden_bound: np.ndarray
    logit_bound: np.ndarray
    probability_bound: np.ndarray
    temperature: float
    checked: int  # numbers compared with a bound
    violations: tuple[BoundCheck, ...]
    derived: int
    exceeded: int
    measured_on: MeasuredOn
    beside: ModelIdentity | None = None  # a model with fewer layers, which is not probed layer by layer
    read_at: str = "layer"
    final_norm: bool = True

    def to_frame(self) -> pd.DataFrame:
        """One row per layer, `what` and step."""
        parts, layers, steps = self.kl.shape
        layer, part, step = (x.ravel() for x in np.meshgrid(range(layers), range(parts), range(steps), indexing="ij"))
        frame = pd.DataFrame({"layer": layer, "what": np.array(self.what)[part], "step": step})
        arrays = [f.name for f in fields(self) if f.type == "np.ndarray"]
        return frame.assign(**{name: getattr(self, name)[part, layer, step] for name in arrays})

    def by_layer(self) -> pd.DataFrame:
        """Means over steps, one row per layer and `what`; `within` is the share of steps with `c ≤ 1`.

        The mean is NaN if it is NaN at one step.
        """
        frame = self.to_frame().assign(within=lambda f: f.variance_bound.notna().astype(float))
        return frame.drop(columns="step").groupby(["layer", "what"], sort=False).mean(skipna=False).reset_index()

    def summary(self) -> pd.DataFrame:
        spaces = ["hidden", "logit", "probability"]
        kl = ["kl", "kl_estimate", "reverse_kl", "variance_bound", "range_bound", "within"]
        return self.by_layer()[["layer", "what", *spaces, *(f"{name}_estimate" for name in spaces), *kl]]

    def answer(self) -> list[str]:
        """Which layer moves the prediction most and least, what the way to it does to a change, and the bounds."""
        means = self.by_layer()
        rows = means[(means.what == self.what[0]) & means.kl.notna()]
        change = "left out" if self.compressed is None else f"as in {self.compressed.name}"
        held = f"{self.checked} numbers were held against proven bounds"
        lines = []
        if self.beside is not None:
            lines.append(
                f"{self.beside.name} has {self.beside.num_layers} of {self.measured_on.model.num_layers} layers: "
                "here layers of the dense model are left out by themselves; its own predictions follow."
            )
        lines += [
            f"{held}: {len(self.violations)} VIOLATED. A theorem does not fail: report it with hierarchy.json."
            if self.violations
            else f"{held}, none violated."
        ]
        if len(rows):
            most, least = rows.loc[rows.kl.idxmax()], rows.loc[rows.kl.idxmin()]
            lines += [
                f"One {self.what[0]} {change}: layer {most.layer} moves the prediction most (KL {most.kl:.3g} nats), "
                f"layer {least.layer} least ({least.kl:.3g}).",
                f"KL by layer: {bars(means[means.what == self.what[0]].kl.to_numpy())}",
                f"The median layer turns the state by {rows.hidden.median():.3g} (1 − cos), the logits by "
                f"{rows.logit.median():.3g}, the probabilities by {rows.probability.median():.3g}.",
                "Of one layer at a time: layers changed together may cost more than their sum.",
            ]
        return [*lines, self.measured_on.line()]

    def headline(self) -> str:
        change = "left out" if self.compressed is None else f"compressed as in {self.compressed.name}"
        if self.beside is not None:
            change = f"of {self.measured_on.model.name} left out, by itself"
        verdict = f"{len(self.violations)} of its bounds VIOLATED" if self.violations else "no bound violated"
        lines = [
            f"One layer {change}, over {self.kl.shape[-1]} decoding steps, T = {self.temperature:g}: "
            f"1 − cos in three spaces, KL in nats; {self.checked} numbers checked, {verdict}",
            f"State read where the {self.read_at} ends, logits with{'' if self.final_norm else 'out'} the final norm",
            f"{self.exceeded} of {self.derived} angles above the bounds derived in docs/remainders.md (not proven)",
            self.measured_on.line(),
        ]
        if self.beside is not None:
            lines.insert(
                1,
                f"{self.beside.name} has {self.beside.num_layers} of {self.measured_on.model.num_layers} layers: "
                "its layers are not probed here; its predictions follow",
            )
        return "\n".join([*lines, *map(str, self.violations)])


@takes_model
@in_eval_mode
@torch.no_grad()
def probe_layers(
    model: InMemory,
    prompts: Readable,
    *,
    change: Literal["dropped"] | PreTrainedModel = "dropped",
    steps: Count = 32,
    what: Sequence[What] = WHAT,
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
    if not what:
        raise LyapunovPruneError(f"what is empty; give some of {', '.join(WHAT)}")
    reading = read(model, prompts, steps - 1)
    batch, structure, windows = reading.batch, reading.structure, reading.windows(batch_size)
    written = greedy_text(reading, windows, steps, written)
    prefix, scorer = reading.prefix, reading.scorer
    if structure.num_layers not in prefix.entries:
        require_finite(structure, windows[0], batch.text)
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
        behind = between_branches(reading.decoder, reading.sublayers, "; read at the layer")
    shape = (len(what), structure.num_layers, len(_MEASURES), len(batch.ids), steps)
    values = torch.full(shape, torch.nan, dtype=torch.float64)
    begins = np.cumsum([0, *map(len, windows)])
    texts = [(k, *part) for k, ids in enumerate(windows) for part in _parts(structure, ids.shape[1], steps)]
    places = [(text, layer) for text in texts for layer in range(structure.num_layers)]
    for (k, at, length), layer in track(places, "hierarchy probe"):
        rows, count = slice(begins[k], begins[k + 1]), at.stop - at.start
        if layer == 0:
            ids = torch.cat([windows[k], written[rows].to(windows[k])], dim=1)[:, :length]
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
                values[i, layer, :, rows, at] = m.view(len(_MEASURES), len(ids), count).cpu()
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
    for number, p, q in prediction_blocks(scorer, read, others, temperature):
        parts[number].append(torch.cat([turn(p.z, q.z), prediction_measures(p.log, q.log)]))
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
