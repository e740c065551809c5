"""How far each run of layers turns the hidden state; the run that turns it least is removed as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lyapunov_prune.arguments import Amount, Count, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import require_finite_layers, residual_stream, run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.states import room_for
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.profiles.propagation import drawn_means
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import LayersGone
from lyapunov_prune.ranking.counts import count_of, protected_layers, require_count
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.wording import layers_of

_TOKENS = 16  # tokens cast to float64 at once; for more, allocating fresh memory costs more than the arithmetic


@dataclass(frozen=True)
class AngularDistance(Ranking):
    """`distance[i, j] = 1 − mean_t cos(h_i,t, h_j,t)` between all boundaries, (L + 1, L + 1) float64.

    `h_i` is the input of layer i, `h_L` the output of the last. The cosine with a zero state counts as 0, between two
    zero states as 1. `distance[l, l + 1]` is Block Influence. Removing the run of layers whose ends are nearest in
    angle comes from arXiv:2403.17887, which uses the angle itself, at the last token. `picked[n − 1, l]` (L, L) is how
    often bootstrap draws of the windows put layer l into the nearest run of n; None for one window.
    """

    distance: np.ndarray
    measured_on: MeasuredOn
    protected: tuple[int, ...] = ()
    picked: np.ndarray | None = None

    criterion = "angular"
    what = "layers"

    def begins(self, remove: int) -> np.ndarray:
        """`distance[l, l + remove]` for every layer l, (L,); NaN if no run begins at l or it holds a protected layer.

        Raises LyapunovPruneError if a run of that length leaves no layer, and if every run holds a protected layer.
        """
        layers = len(self.distance) - 1
        require_count(remove, layers)
        scores = np.append(self.distance.diagonal(remove), np.full(remove - 1, np.nan))
        scores[_blocked(layers, remove, self.protected)] = np.nan
        if np.isnan(scores).all():
            raise LyapunovPruneError(f"every run of {remove} layers holds a protected one; protect fewer")
        return scores

    @checked
    def plan(self, remove: Amount) -> PruningPlan:
        """The plan that removes the run of `remove` layers whose ends are nearest; the first of equal runs.

        Its scores are `begins(remove)`. Raises LyapunovPruneError as that does.
        """
        remove = count_of(remove, self.measured_on.model.num_layers)
        scores = self.begins(remove)
        first = int(np.nanargmin(scores))
        return PruningPlan(
            gone=LayersGone(tuple(range(first, first + remove))),
            criterion=self.criterion,
            alpha=None,
            scores=scores,
            model=self.measured_on.model,
            measured_on=(self.measured_on,),
            picked=None if self.picked is None else self.picked[remove - 1],
        )

    def to_frame(self) -> pd.DataFrame:
        """The nearest run of every length."""
        gaps = np.diff([-1, *self.protected, len(self.distance) - 1]) - 1  # runs between protected layers
        longest = int(min(gaps.max(), len(self.distance) - 2))
        plans = [self.plan(n) for n in range(1, longest + 1)]
        return pd.DataFrame(
            {
                "layers": [len(p.remove) for p in plans],
                "first": [p.remove[0] for p in plans],
                "last": [p.remove[-1] for p in plans],
                "distance": [float(p.scores[p.remove[0]]) for p in plans],
            }
        )

    def answer(self) -> list[str]:
        frame = self.to_frame()
        shown = frame[frame.layers.isin([1, 2, 4, 8])]
        runs = "; ".join(f"{layers_of(range(r.first, r.last + 1))} ({r.distance:.3g})" for r in shown.itertuples())
        return [
            f"The runs of layers that turn the state least (1 − cos): {runs}.",
            "A small angle is a score, no loss: prune, then eval --against shows what a run costs.",
            self.measured_on.line(),
        ]

    def headline(self) -> str:
        return f"Runs of layers that turn the state least, 1 − cos\n{self.measured_on.line()}"


@runs_model
def angular_distance(
    model: Streamable,
    batch: Readable,
    *,
    batch_size: Count = 1,
    protect: Sequence[int] = (),
    folder: Path | None = None,
) -> AngularDistance:
    """Measure `AngularDistance` in one forward per window; no run of a plan holds a layer of `protect`.

    Memory: L × `batch_size` × tokens × width in the model's dtype; for a streamed model, all windows are one batch. If
    that does not fit, the states are kept in a file in `folder` (`room_for`).

    Raises NonFiniteError naming the first layer with NaN or infinite activations, and LyapunovPruneError for ids
    outside the vocabulary, a context too long, or a decoder that carries several states a token.
    """
    reading = read(model, batch)
    batch, structure = reading.batch, reading.structure
    protected = protected_layers(structure.num_layers, protect)

    def cosines(first: int, ids: torch.Tensor) -> list[np.ndarray]:
        kept: list[torch.Tensor] = []

        def visit(layer: int, hidden: torch.Tensor) -> None:
            if not kept:
                kept.append(room_for(structure.num_layers + 1, hidden, folder))
            kept[0][layer] = hidden

        with residual_stream(structure, visit):
            run_backbone(structure, ids)
        return [_cosines(list(window)) for window in kept[0].unbind(1)]

    sums = [of_window for some in dealt(reading, batch_size, cosines, "angular distance") for of_window in some]
    distances = 1 - np.array(sums) / batch.context
    distance = distances.mean(0)
    require_finite_layers(np.isfinite(distance.diagonal()), batch.text, first=0)
    np.fill_diagonal(distance, 0.0)
    return AngularDistance(distance, reading.measured_on(), protected, _picked(distances, protected))


def _cosines(states: Sequence[torch.Tensor]) -> np.ndarray:
    """`Σ_t cos` between the states (tokens × width) of one window at all boundaries, (L + 1, L + 1)."""
    sums = torch.zeros(len(states), len(states), dtype=torch.float64, device=lift(states[0][:0]).device)
    for block in zip(*(state.split(_TOKENS) for state in states), strict=True):
        H = lift(torch.stack([state.to(block[0].device) for state in block]))
        norm = torch.linalg.vector_norm(H, dim=-1, keepdim=True)
        U = (H / norm.clamp_min(torch.finfo(torch.float32).tiny)).flatten(1)
        zero = (norm.squeeze(-1) == 0).double()
        sums += U @ U.T + zero @ zero.T
    return sums.cpu().numpy()


def _picked(distances: np.ndarray, protected: tuple[int, ...]) -> np.ndarray | None:
    """`AngularDistance.picked`, of the distances in each window, (windows, L + 1, L + 1)."""
    windows, layers = len(distances), distances.shape[1] - 1
    if windows == 1:
        return None
    often = np.zeros((layers, layers))
    for remove in range(1, layers):  # one is left
        runs = drawn_means(distances.diagonal(remove, 1, 2).T)
        assert runs is not None
        blocked = _blocked(layers, remove, protected)[: runs.shape[1]]
        if blocked.all():
            continue
        runs[:, blocked] = np.inf
        wins = np.bincount(runs.argmin(1), minlength=layers) / len(runs)
        for first in np.flatnonzero(wins):
            often[remove - 1, first : first + remove] += wins[first]
    return often


def _blocked(layers: int, remove: int, protected: tuple[int, ...]) -> np.ndarray:
    """For every first layer, whether the run of `remove` layers would hold a protected one, (L,) bool."""
    blocked = np.zeros(layers, dtype=bool)
    for layer in protected:
        blocked[max(0, layer - remove + 1) : layer + 1] = True
    return blocked
