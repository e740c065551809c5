"""What a search for the best set of layers tried, and what it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.candidates import Layers
from lyapunov_prune.ranking.criteria import require_known_count
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.arrays import require_layers
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn

_DRAWS = 1000  # of as many windows as there are


@dataclass(frozen=True)
class Tried:
    """A set of layers that was checked: the mean loss of every check window without it (nats), and the cost so far.

    `by` names the criteria that chose it, or the swap. `p_value` is that of the paired test of a swap against the best
    set of before, 1 where a loss is not finite, and NaN for what a criterion chose; `forwards` were spent when it was
    known.
    """

    by: str
    layers: Layers
    windows: np.ndarray
    p_value: float
    forwards: float


@dataclass(frozen=True)
class Mended:
    """A tried set, its gaps mended on the windows that were scored: the mean loss of every check window (nats)."""

    layers: Layers
    windows: np.ndarray
    forwards: float


@dataclass(frozen=True)
class BestRemoval(Ranking):
    """The sets that were tried for a removal, in order, and the one that is believed best: `tried[chosen]`.

    `dense` is the loss of every check window of the dense model. Scores were measured on `measured_on`, losses on
    `checked_on`, other windows of the same text. `left_out` names the measurements that would have cost more than half
    of what was left of `search` forwards. Of a search for what is to be mended `mended` holds the sets that were
    compared so, of which the chosen is one; empty where the forwards did not last for any, or none could be mended.
    """

    tried: tuple[Tried, ...]
    chosen: int
    dense: np.ndarray
    search: float
    left_out: tuple[str, ...]
    protected: Layers
    measured_on: MeasuredOn
    checked_on: MeasuredOn
    mended: tuple[Mended, ...] = ()

    criterion = "best"
    what = "layers"

    def __post_init__(self) -> None:
        if not 0 <= self.chosen < len(self.tried):
            raise LyapunovPruneError(f"the search chose set {self.chosen} of {len(self.tried)}; search again")
        tried = [tried.layers for tried in self.tried]
        for layers in tried:
            require_layers("best removal, layers", layers, self.measured_on.model.num_layers)
        if self.mended and not {self.remove} <= {mended.layers for mended in self.mended} <= set(tried):
            raise LyapunovPruneError("the search chose, or mended, another set than it tried; search again")

    @property
    def remove(self) -> Layers:
        return self.tried[self.chosen].layers

    @property
    def forwards(self) -> float:
        """What was spent, in forwards of the dense model over the check windows."""
        return (self.mended or self.tried)[-1].forwards

    @property
    def compared(self) -> Sequence[Tried | Mended]:
        """The sets among which the losses of the check windows chose: mended ones, where there are any."""
        return self.mended or self.tried

    @checked
    def plan(self, remove: int, period: int = 1) -> PruningPlan:
        """The plan that removes the chosen set.

        The score of a layer is the least mean loss (nats) of the tried sets it is in, NaN where it is in none. Raises
        LyapunovPruneError for another number of layers than was searched, and for periods, which are not kept.
        """
        require_known_count(self.criterion, remove, period != 1)
        if remove != len(self.remove):
            raise LyapunovPruneError(f"the search was for {len(self.remove)} layers, not {remove}; search again")
        scores = np.full(self.measured_on.model.num_layers, np.nan)
        for tried in self.tried:
            layers = list(tried.layers)
            scores[layers] = np.fmin(scores[layers], tried.windows.mean())
        return PruningPlan(
            remove=self.remove,
            criterion=self.criterion,
            alpha=None,
            scores=scores,
            model=self.measured_on.model,
            measured_on=(self.measured_on, self.checked_on),
            picked=self.picked(),
        )

    def picked(self) -> np.ndarray:
        """How often each layer is in the best of the compared sets when the check windows are drawn anew, (L,)."""
        losses = np.array([compared.windows for compared in self.compared])
        windows = np.random.default_rng(0).integers(losses.shape[1], size=(_DRAWS, losses.shape[1]))
        means = losses[:, windows].mean(-1)
        best = np.argmin(np.where(np.isnan(means), np.inf, means), axis=0)
        members = np.zeros((len(losses), self.measured_on.model.num_layers))
        for row, compared in zip(members, self.compared, strict=True):
            row[list(compared.layers)] = 1
        return members[best].mean(0)

    def to_frame(self) -> pd.DataFrame:
        means = np.array([tried.windows.mean() for tried in self.tried])
        mended = {each.layers: float(each.windows.mean()) for each in self.mended}
        with np.errstate(over="ignore"):
            columns = {
                "by": [tried.by for tried in self.tried],
                "layers": [", ".join(map(str, tried.layers)) for tried in self.tried],
                "perplexity": np.exp(means),
                "× dense": np.exp(means - self.dense.mean()),
            }
            if mended:
                columns["mended"] = np.exp([mended.get(tried.layers, np.nan) for tried in self.tried])
        return pd.DataFrame(
            {
                **columns,
                "p": [tried.p_value for tried in self.tried],
                "forwards": [tried.forwards for tried in self.tried],
                "chosen": np.arange(len(self.tried)) == self.chosen,
            }
        )

    def headline(self) -> str:
        mended = f" ({len(self.mended)} of them mended)" if self.mended else ""
        out = f"; not measured for its cost: {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"Best of {len(self.tried)} sets of {len(self.remove)} layers{mended}, by the loss of {len(self.dense)} "
            f"windows that no score has seen; {self.forwards:.1f} of {self.search:g} forwards spent{out}\n"
            f"Removes layers {', '.join(map(str, self.remove))}\n{self.checked_on.line()}"
        )
