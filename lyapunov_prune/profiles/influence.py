"""Block Influence: by how much a layer turns the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.forward.hooks import require_finite_layers, residual_stream, run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import token_energy, widen
from lyapunov_prune.models.decoder import StreamableText, runs_model
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.profiles.propagation import drawn_means
from lyapunov_prune.progress import track
from lyapunov_prune.results.arrays import require_array
from lyapunov_prune.results.frames import pd
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

    influence: np.ndarray
    spread: np.ndarray
    change: np.ndarray
    measured_on: MeasuredOn
    windows: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape = (self.measured_on.model.num_layers,)
        require_array("Block Influence, influence", self.influence, shape)
        require_array("Block Influence, spread", self.spread, shape, finite=False)
        require_array("Block Influence, change", self.change, shape)
        if self.windows is not None:
            require_array("Block Influence, windows", self.windows, (*shape, self.windows.shape[-1]), least=-np.inf)

    def drawn(self) -> np.ndarray | None:
        """Bootstrap samples of the influence over windows, (draws, L); None for a single window."""
        return None if self.windows is None else drawn_means(self.windows)

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "layer": np.arange(len(self.influence)),
                "block_influence": self.influence,
                "standard_error": self.spread,
                "relative_change": self.change,
            }
        )

    def headline(self) -> str:
        return f"Block Influence\n{self.measured_on.line()}"


@runs_model
def block_influence(model: StreamableText, batch: Readable, *, batch_size: Count = 1) -> InfluenceProfile:
    """Measure Block Influence of every layer in one forward per window.

    `1 − cos(a, b)` is computed as `½ ‖a/‖a‖ − b/‖b‖‖²`, which avoids cancellation when a layer barely turns the state.
    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError for ids
    outside the vocabulary or windows longer than the context.
    """
    reading = read(model, batch)
    values = turns(reading.structure, reading.windows(batch_size))
    finite = np.isfinite(values).all((-2, -1))
    require_finite_layers(finite, reading.batch.text)
    windows = values.shape[-1]
    influence, change = values[:, 0], values[:, 1]
    return InfluenceProfile(
        influence=influence.mean(-1),
        spread=influence.std(-1, ddof=1) / np.sqrt(windows) if windows > 1 else np.full(len(values), np.nan),
        change=change.mean(-1),
        measured_on=reading.measured_on(),
        windows=influence,
    )


UnitAndNorm = tuple[torch.Tensor, torch.Tensor]


def unit_and_norm(hidden: torch.Tensor) -> UnitAndNorm:
    """`h_t/‖h_t‖` and `‖h_t‖` of every token; a zero state stays zero."""
    norm = token_energy(hidden).sqrt()
    return hidden / norm.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1).to(hidden), norm


def turned(before: UnitAndNorm, after: UnitAndNorm) -> torch.Tensor:
    """`1 − cos` of every token, float64: 1 where one of the states is zero, 0 where both are."""
    (a, old), (b, new) = before, after
    return torch.where((old == 0) ^ (new == 0), 1, token_energy(b - a) / 2)


@torch.no_grad()
def turns(structure: Structure, inputs: Sequence[torch.Tensor]) -> np.ndarray:
    """Influence and change of every layer on every item, from batches of token ids or pixels: (L, 2, items)."""
    rows: list[np.ndarray] = []
    for part in track(inputs, "block influence"):
        sums: list[torch.Tensor] = []
        before: list[UnitAndNorm] = []  # new tensors, because a layer may change its input in place

        def visit(
            layer: int, hidden: torch.Tensor, sums: list[torch.Tensor] = sums, before: list[UnitAndNorm] = before
        ) -> None:
            after = unit_and_norm(widen(hidden))
            if before:
                unit, old = (x.to(hidden.device) for x in before.pop())  # the layer before may be on another device
                norm, turn = after[1], turned((unit, old), after)
                moved = ((norm - old).square() + 2 * norm * old * turn).sqrt() / old
                sums.append(torch.stack([turn.mean(-1), torch.where(old == 0, 0, moved).mean(-1)]))
            before.append(after)

        with residual_stream(structure, visit):
            run_backbone(structure, part)
        rows.append(torch.stack([s.cpu() for s in sums]).numpy())
    return np.concatenate(rows, axis=-1)
