"""The sets of layers that a search tried, and the one it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lyapunov_prune.arguments import Amount, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import chance, compare
from lyapunov_prune.mending.report import pays
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import LayersGone
from lyapunov_prune.ranking.candidates import Layers
from lyapunov_prune.ranking.counts import count_of
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.arrays import require_fitting, require_layers
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, MeasuredOn
from lyapunov_prune.results.wording import layers_of


@dataclass(frozen=True)
class Tried:
    """A set of layers checked on all tokens: the mean loss of each check window without it (nats), and the cost so far.

    `by` names the criteria that proposed it or, for a `swap`, the layer that goes and the one that stays instead.
    `forwards` is the cost spent by the time its losses were known.
    """

    by: str
    layers: Layers
    windows: np.ndarray
    swap: bool
    forwards: float


@dataclass(frozen=True)
class Final:
    """A tried set in the last comparison: the mean loss of every window (nats) with its gaps mended and open.

    `mended` holds the losses on the check windows with the maps; `other` and `other_mended` those on the second text
    without and with the maps. NaN if a gap cannot be mended.
    """

    layers: Layers
    mended: np.ndarray
    other: np.ndarray
    other_mended: np.ndarray
    forwards: float


@dataclass(frozen=True)
class BestRemoval(Ranking):
    """The sets that were checked on all tokens for a removal, in order, and the best of them, `tried[chosen]`.

    It has the least mean loss on the check windows. Sets that were worse on the beginnings of these windows are not
    kept. `dense` is the dense loss of every check window. Scores were measured on the beginnings of `measured_on`,
    losses on `checked_on`, which are other windows of the same text. `left_out` names the measurements that would have
    cost more than a quarter of the remaining `search` forwards or that refuse the model.

    If the gaps are to be mended, `finals` holds the best sets, judged with their gaps open and mended on a second text,
    `other_on`, too. A set counts as mended if that pays (`mending.report.pays`), and the chosen set has the least loss,
    averaged over both texts. `finals` is empty if the forwards did not suffice.
    """

    tried: tuple[Tried, ...]
    chosen: int
    dense: np.ndarray
    search: float
    left_out: tuple[str, ...]
    protected: Layers
    measured_on: MeasuredOn
    checked_on: MeasuredOn
    finals: tuple[Final, ...] = ()
    other_on: MeasuredOn | None = None

    criterion = "best"
    what = "layers"

    def __post_init__(self) -> None:
        chose = f"the search chose set {self.chosen} of {len(self.tried)}"
        require_fitting(0 <= self.chosen < len(self.tried), chose)
        tried = [tried.layers for tried in self.tried]
        for layers in tried:
            require_layers("best removal, layers", layers, self.measured_on.model.num_layers)
        finals = {final.layers for final in self.finals}
        require_fitting(not finals or {self.remove} <= finals <= set(tried), f"{chose}, or mended one it never tried")
        require_fitting(bool(finals) == (self.other_on is not None), "sets compared mended need a second text")

    def with_finals(self, finals: Sequence[Final], other_on: MeasuredOn) -> BestRemoval:
        """This search with its best sets mended; the chosen set has the least loss, averaged over both texts."""

        def loss(final: Final) -> float:
            cut = self._cut(final)
            check, other = (final.mended, final.other_mended) if mended(final, cut) else (cut, final.other)
            return float(np.nan_to_num(check.mean() + other.mean(), nan=np.inf))  # NaN is worse than any loss

        best = min(finals, key=loss).layers
        chosen = next(k for k, tried in enumerate(self.tried) if tried.layers == best)
        return replace(self, chosen=chosen, finals=tuple(finals), other_on=other_on)

    def _cut(self, final: Final) -> np.ndarray:
        return next(tried.windows for tried in self.tried if tried.layers == final.layers)

    @property
    def remove(self) -> Layers:
        return self.tried[self.chosen].layers

    @property
    def forwards(self) -> float:
        """The cost in forwards of the dense model over the check windows."""
        return (self.finals or self.tried)[-1].forwards

    @checked
    def plan(self, remove: Amount) -> PruningPlan:
        """The plan that removes the chosen set.

        The score of a layer is the least mean loss (nats) of the tried sets that hold it, NaN if none does. Raises
        LyapunovPruneError for another number of layers than was searched.
        """
        remove = count_of(remove, self.measured_on.model.num_layers)
        if remove != len(self.remove):
            raise LyapunovPruneError(f"the search was for {len(self.remove)} layers, not {remove}; search again")
        scores = np.full(self.measured_on.model.num_layers, np.nan)
        for tried in self.tried:
            layers = list(tried.layers)
            scores[layers] = np.fmin(scores[layers], tried.windows.mean())
        return PruningPlan(
            gone=LayersGone(self.remove),
            criterion=self.criterion,
            alpha=None,
            scores=scores,
            model=self.measured_on.model,
            measured_on=(self.measured_on, self.checked_on, *([self.other_on] if self.other_on else [])),
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a tried set; `p` is the probability that chance alone favours the chosen set this much."""
        means = np.array([tried.windows.mean() for tried in self.tried])
        with np.errstate(over="ignore"):
            columns = {
                "by": [tried.by for tried in self.tried],
                "layers": [_listed(tried.layers) for tried in self.tried],
                "perplexity": np.exp(means),
                "× dense": np.exp(means - self.dense.mean()),
            }
            if self.finals:
                finals = {final.layers: final for final in self.finals}
                for name in ("mended", "other", "other_mended"):
                    found = [
                        getattr(finals[t.layers], name).mean() if t.layers in finals else np.nan for t in self.tried
                    ]
                    columns[name.replace("_", ", ")] = np.exp(found)
        return pd.DataFrame(
            {
                **columns,
                "p": [self._p_value(tried) for tried in self.tried],
                "forwards": [tried.forwards for tried in self.tried],
                "chosen": np.arange(len(self.tried)) == self.chosen,
            }
        )

    def _p_value(self, tried: Tried) -> float:
        chosen = self.tried[self.chosen]
        return np.nan if tried is chosen else chance(tried.windows, chosen.windows)

    def certainty(self) -> str:
        """Which other tried sets the check windows cannot tell apart from the chosen one."""
        chosen = self.tried[self.chosen].windows
        others = [t for t in self.tried if t.layers != self.remove and np.isfinite(t.windows).all()]
        if not others:
            return ""
        nearest = min(others, key=lambda t: float(t.windows.mean()))
        told = compare(chosen, nearest.windows)
        close = [t for t in others if not compare(t.windows, chosen).pays]
        how = (
            "Significantly better than every other set; the next,"
            if not close
            else (f"No significant difference from {len(close)} of the others, as")
        )
        return f"{how} layers {_listed(nearest.layers)}: {told.told()}"

    def answer(self) -> list[str]:
        windows = self.tried[self.chosen].windows
        with np.errstate(over="ignore"):
            cut, times = np.exp(windows.mean()), np.exp(windows.mean() - self.dense.mean())
        layers = self.measured_on.model.num_layers
        return [
            f"Remove {layers_of(self.remove)} (of 0 to {layers - 1}): the best of {len(self.tried)} sets tried.",
            f"Perplexity {cut:.4g} without them, {times:.3g} × dense, on {len(self.dense)} windows that no score has "
            "seen, used to choose.",
            *filter(None, (self.certainty(), self._finals_told() if self.finals else "")),
            "Measure the result on other text: eval --against, on the evaluation half.",
            self.checked_on.line(),
        ][:LINES]

    def headline(self) -> str:
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        lines = [
            f"Best of {len(self.tried)} sets that were tried, by the loss of {len(self.dense)} windows "
            f"that no score has seen, used to choose; {self.forwards:.1f} of {self.search:g} forwards spent{out}",
            f"Removes layer{'s' * (len(self.remove) > 1)} {_listed(self.remove)}",
            self._finals_told() if self.finals else self.certainty(),
            self.checked_on.line(),
        ]
        return "\n".join(filter(None, lines))

    def _finals_told(self) -> str:
        assert self.other_on is not None
        final = next(final for final in self.finals if final.layers == self.remove)
        how = "mended" if mended(final, self.tried[self.chosen].windows) else "better left unmended"
        return (
            f"Of {len(self.finals)} compared mended and not, by those windows and {self.other_on.tokens} tokens of "
            f"{self.other_on.text}; {how}"
        )


def mended(final: Final, cut: np.ndarray) -> bool:
    """Whether a set counts as mended; `cut` are its losses on the check windows with open gaps."""
    if not (np.isfinite(final.mended).all() and np.isfinite(final.other).all()):
        return False
    return pays(compare(cut, final.mended), compare(final.other, final.other_mended))


def _listed(layers: Layers) -> str:
    return ", ".join(map(str, layers))
