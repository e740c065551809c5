"""Block Influence: by how much a layer, or its attention or MLP alone, turns the residual stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from lyapunov_prune.arguments import Count
from lyapunov_prune.forward.anatomy import KINDS, Anatomy, require_some
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import hidden_of, layer_input, require_finite_layers, residual_stream, run_backbone
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.linalg import token_energy, widen
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.profiles.propagation import drawn_means
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.axes import Loose, Per, PerLayer
from lyapunov_prune.results.frames import pd, rows
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class InfluenceProfile(Result):
    """Block Influence of every layer, float64, (L,).

    `influence_l = 1 − mean_t cos(h_l,t, h_{l+1},t)` (ShortGPT, arXiv:2403.03853, eq. 1) and
    `change_l = mean_t ‖h_{l+1},t − h_l,t‖ / ‖h_l,t‖`, the relative size of the residual update. A state that is exactly
    zero (the embedding of a padding token) has no direction: its cosine counts as 0, or as 1 if it stays zero; its
    change counts as 0. `spread` is the standard error of `influence` over windows (NaN for one window), and `windows`
    (L, W) holds that of each; None in old files.
    """

    influence: PerLayer
    spread: Loose
    change: PerLayer
    measured_on: MeasuredOn
    windows: Annotated[np.ndarray | None, Per("layer", "window", least=-np.inf)] = None

    def drawn(self) -> np.ndarray | None:
        """Bootstrap samples of the influence over windows, (draws, L); None for a single window."""
        return None if self.windows is None else drawn_means(self.windows)

    def to_frame(self) -> pd.DataFrame:
        return rows(self, "layer", block_influence="influence", standard_error="spread", relative_change="change")

    def headline(self) -> str:
        return f"Block Influence\n{self.measured_on.line()}"


@runs_model
def block_influence(model: Streamable, batch: Readable, *, batch_size: Count = 1) -> InfluenceProfile:
    """Measure Block Influence of every layer in one forward per window.

    `1 − cos(a, b)` is computed as `½ ‖a/‖a‖ − b/‖b‖‖²`, which avoids cancellation when a layer barely turns the state.
    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError for ids
    outside the vocabulary or windows longer than the context.
    """
    reading = read(model, batch)
    values = turns_of(reading, batch_size)
    finite = np.isfinite(values).all((-2, -1))
    require_finite_layers(finite, reading.batch.text)
    influence, change = values[:, 0], values[:, 1]
    return InfluenceProfile(
        influence=influence.mean(-1),
        spread=_standard_error(influence),
        change=change.mean(-1),
        measured_on=reading.measured_on(),
        windows=influence,
    )


def _standard_error(values: np.ndarray) -> np.ndarray:
    """The standard error of the mean over windows, the last axis; NaN for one window."""
    windows = values.shape[-1]
    return values.std(-1, ddof=1) / np.sqrt(windows) if windows > 1 else np.full(values.shape[:-1], np.nan)


UnitAndNorm = tuple[torch.Tensor, torch.Tensor]


def unit_and_norm(hidden: torch.Tensor) -> UnitAndNorm:
    """`h_t/‖h_t‖` and `‖h_t‖` of every token; a zero state stays zero."""
    norm = token_energy(hidden).sqrt()
    return hidden / norm.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1).to(hidden), norm


def turned(before: UnitAndNorm, after: UnitAndNorm) -> torch.Tensor:
    """`1 − cos` of every token, float64: 1 where one of the states is zero, 0 where both are."""
    (a, old), (b, new) = before, after
    return torch.where((old == 0) ^ (new == 0), 1, token_energy(b - a) / 2)


def turns_of(reading: Reading, batch_size: int) -> np.ndarray:
    """`turns` of all windows."""
    each = dealt(reading, batch_size, lambda first, ids: turns(reading.structure, ids), "block influence")
    return np.concatenate(each, axis=-1)


@torch.no_grad()
def turns(structure: Structure, inputs: torch.Tensor) -> np.ndarray:
    """Influence and change of every layer on every item of a batch of token ids or pixels: (L, 2, items)."""
    sums: list[torch.Tensor] = []
    before: list[UnitAndNorm] = []  # new tensors, because a layer may change its input in place

    def visit(layer: int, hidden: torch.Tensor) -> None:
        after = unit_and_norm(widen(hidden))
        if before:
            unit, old = (x.to(hidden.device) for x in before.pop())  # the layer before may be on another device
            norm, turn = after[1], turned((unit, old), after)
            moved = ((norm - old).square() + 2 * norm * old * turn).sqrt() / old
            sums.append(torch.stack([turn.mean(-1), torch.where(old == 0, 0, moved).mean(-1)]))
        before.append(after)

    with residual_stream(structure, visit):
        run_backbone(structure, inputs)
    return torch.stack([s.cpu() for s in sums]).numpy()


@dataclass(frozen=True)
class SublayerInfluence(Result):
    """`1 − mean_t cos(h_t, h_t + b(h)_t)` of both sublayers `b` of every layer, float64, (L,).

    `h` is the residual stream before the sublayer (LLM-Drop, arXiv:2406.15786); cosines of zero states count as in
    `InfluenceProfile`. The spreads are standard errors over windows (NaN for one window). A missing sublayer is NaN.
    `windows` holds the values per window by sublayer, (L, W); None in old files.
    """

    attention: Loose
    mlp: Loose
    attention_spread: Loose
    mlp_spread: Loose
    measured_on: MeasuredOn
    windows: Annotated[dict[str, np.ndarray] | None, Per("layer", "window", finite=False)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.windows is None or set(self.windows) == set(KINDS)
        require_fitting(fits, "Block Influence: the windows are of attention and MLP")

    def drawn(self, what: str) -> np.ndarray | None:
        """Bootstrap samples of the influence of `what` over windows, (draws, L); None for a single window."""
        return None if self.windows is None else drawn_means(self.windows[what])

    def to_frame(self) -> pd.DataFrame:
        return rows(
            self,
            "layer",
            attention="attention",
            attention_error="attention_spread",
            mlp="mlp",
            mlp_error="mlp_spread",
        )

    def headline(self) -> str:
        return f"Block Influence of attention and MLP\n{self.measured_on.line()}"


@runs_model
def sublayer_influence(model: Streamable, batch: Readable, *, batch_size: Count = 1) -> SublayerInfluence:
    """Measure both sublayers of every layer in one forward per window.

    The stream after the first sublayer is read at the input of the second, so residual multipliers are included;
    parallel sublayers are both measured from the layer's input. `1 − cos` is computed as in `block_influence`. Raises
    NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError for weights that are
    not plain matrices in memory, and if no layer has an attention or MLP that can be told apart.
    """
    reading = read(model, batch)
    structure = reading.structure
    anatomy = reading.anatomy
    require_some(reading.decoder, anatomy)

    def measure(first: int, ids: torch.Tensor) -> np.ndarray:
        unseen = torch.full((2, len(ids)), torch.nan, dtype=torch.float64)  # for layers that text does not run
        by_layer = dict.fromkeys(anatomy, unseen)
        with ExitStack() as hooks:
            for index, found in anatomy.items():
                hooks.enter_context(_watched(structure.layers[index], index, found, by_layer))
            run_backbone(structure, ids)
        return torch.stack([by_layer[i] for i in range(structure.num_layers)]).numpy()

    values = np.concatenate(dealt(reading, batch_size, measure, "sublayer influence"), axis=-1)  # (L, 2, windows)
    missing = np.array([[kind not in anatomy[i].whole for kind in KINDS] for i in range(len(values))])
    finite = (np.isfinite(values) | missing[..., None]).all((-2, -1))
    require_finite_layers(finite, reading.batch.text)
    (attention, mlp), (attention_spread, mlp_spread) = values.mean(-1).T, _standard_error(values).T
    by_window = dict(zip(KINDS, values.transpose(1, 0, 2), strict=True))
    return SublayerInfluence(attention, mlp, attention_spread, mlp_spread, reading.measured_on(), by_window)


def _watched(
    layer: nn.Module, index: int, found: Anatomy, by_layer: dict[int, torch.Tensor]
) -> AbstractContextManager[None]:
    """Store in `by_layer[index]` by how much attention and MLP of `layer` turn the stream: (2, windows)."""
    parts = found.whole
    # One entry per piece of the batch, which a streamed layer may split:
    between: list[torch.Tensor] = []  # the stream at the input of the second sublayer
    added = [[list[torch.Tensor]() for _ in part.branches] for part in parts.values()]  # the output of each branch

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        between.append(layer_input(args, kwargs))

    def leave(pieces: list[torch.Tensor], module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pieces.append(hidden_of(output))

    def finish(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = layer_input(args, kwargs).to(hidden_of(output).device)  # the layer before may be on another device
        if found.parallel:
            outputs = [[torch.cat(pieces).view_as(before) for pieces in of_part] for of_part in added]
            steps = [(before, before + sum(of_part)) for of_part in outputs]
        else:
            stream = [before, *([torch.cat(between).view_as(before)] if between else []), hidden_of(output)]
            steps = list(pairwise(stream))
        rows = dict(zip(parts, (_turn(*step) for step in steps), strict=False))
        nothing = torch.full(before.shape[:1], torch.nan, dtype=torch.float64)
        by_layer[index] = torch.stack([rows.get(kind, nothing) for kind in KINDS])
        for pieces in (between, *chain(*added)):
            pieces.clear()

    if found.parallel:
        exits = [branch.exit for part in parts.values() for branch in part.branches]
        leaving = [(exit, partial(leave, pieces)) for exit, pieces in zip(exits, chain(*added), strict=True)]
        return hooked(after=[*leaving, (layer, finish)])
    return hooked(before=[(part.branches[0].entry, enter) for part in [*parts.values()][1:]], after=[(layer, finish)])


def _turn(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`mean_t 1 − cos` of each window, float64, on the CPU."""
    return turned(unit_and_norm(widen(before)), unit_and_norm(widen(after))).mean(-1).cpu()
