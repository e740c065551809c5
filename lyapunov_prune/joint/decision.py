"""The decision: the best pair of counts within a budget according to the map, and its reliability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from scipy import stats

from lyapunov_prune.arguments import Count, NonNegative, checked
from lyapunov_prune.bounds.choice import argmax_of_noise_lt_half_gap
from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.joint.map import JointMap
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result

_RISK = 0.05  # probability that the noise of some pair exceeds the bound
_SHOWN = 12


_Score = Annotated[np.ndarray, Per("pair", least=-np.inf)]


@dataclass(frozen=True)
class JointDecision(Result):
    """All pairs `(n_a, n_g)` with `n_a + n_g = remove`, (m, 2) int, and the map's predictions; the largest is chosen.

    `low` and `high` are the map's prediction interval. `noise` bounds how far P may be from the mean score of a pair
    over seeds, for all m pairs simultaneously and up to a common constant, which changes no comparison
    (`argmax_add_const`): `t σ max √h`, with h the `contrast` of the map and t Student's quantile at `1 − 0.05/2m`
    (Bonferroni). `t σ` is the larger one of two estimates, each with its degrees of freedom: `over_seeds`, the pooled
    deviation of repeated scores of a pair (NaN and 0 if there are none), and `residual`, that of the points around the
    map. Misfit therefore counts as far as the points show it; between the points the polynomial is assumed to be
    correct. `selection_error` is the standard error of a difference of two scores on the selection set.
    """

    layers: int
    remove: int
    pairs: Annotated[np.ndarray, Per("pair", 2, below="layer+1")]
    predicted: _Score
    low: _Score
    high: _Score
    noise: float
    over_seeds: tuple[float, int]
    residual: tuple[float, int]
    selection_error: float
    measured_on: tuple[MeasuredOn, ...] = ()

    @property
    def best(self) -> int:
        """Index of the chosen pair in `pairs`."""
        return int(self.predicted.argmax())

    @property
    def chosen(self) -> tuple[int, int]:
        """Number of attentions and activations to remove."""
        attention, activation = self.pairs[self.best].tolist()
        return attention, activation

    @property
    def gap(self) -> float:
        """Margin of the chosen pair over the next one; infinite if it is the only one."""
        others = np.delete(self.predicted, self.best)
        return float(self.predicted[self.best] - others.max()) if len(others) else np.inf

    @property
    def within(self) -> np.ndarray:
        """(m,) bool: pairs within twice the noise of the chosen one, including it; the best pair is one of them."""
        return self.predicted >= self.predicted[self.best] - 2 * self.noise

    @property
    def certain(self) -> bool:
        """Whether no other pair can be better, given the stated noise (`argmax_of_noise_lt_half_gap`)."""
        return argmax_of_noise_lt_half_gap(self.predicted, self.noise)

    @property
    def regret(self) -> float:
        """The largest possible loss of score by the choice (`regret_of_argmax_le`); 0 if it is certain."""
        return 0.0 if self.certain else 2 * self.noise

    def to_frame(self) -> pd.DataFrame:
        attention, activation = self.pairs.T
        columns = {"attention": attention, "activation": activation, "predicted": self.predicted}
        places = np.arange(len(self.pairs)) == self.best
        return pd.DataFrame(
            {**columns, "low": self.low, "high": self.high, "chosen": places, "within noise": self.within}
        )

    def summary(self) -> pd.DataFrame:
        return self.to_frame().sort_values("predicted", ascending=False, kind="stable").head(_SHOWN)

    def headline(self) -> str:
        attention, activation = self.chosen
        seeds = "no repeated seeds"
        if self.over_seeds[1]:
            seeds = f"{self.over_seeds[0]:.3g} over seeds ({self.over_seeds[1]} degrees of freedom)"
        around = f"{self.residual[0]:.3g} around the map ({self.residual[1]})"
        others = int(self.within.sum()) - 1
        verdict = (
            "certain as long as the noise is below its bound (argmax_of_noise_lt_half_gap)"
            if self.certain
            else f"not certain: {others} other pairs are within twice the noise, and the choice can cost up to "
            f"{self.regret:.3g} (regret_of_argmax_le)"
        )
        if self.selection_error > self.gap:
            verdict += (
                f"; the selection error is {self.selection_error:.3g}, above the gap: the set cannot separate the "
                "chosen pair from the next one"
            )
        return (
            f"Remove {attention} attentions and {activation} activations of {self.layers} layers: the first of "
            f"{len(self.pairs)} pairs with {self.remove} to remove, by {self.gap:.3g}; noise at most {self.noise:.3g}, "
            f"from {seeds} and {around}. It is {verdict}"
        )


@checked
def decide(
    fitted: JointMap,
    layers: Count,
    *,
    remove: int,
    most: tuple[int, int] | None = None,
    repeats: Sequence[Sequence[float]] = (),
    selection_error: NonNegative,
) -> JointDecision:
    """The pair of largest P with `n_a + n_g = remove`.

    `most` is how many attentions and activations can be removed at all (default: L each). `repeats` holds, for
    some pairs, the scores of two or more seeds. `selection_error` is the standard error of the difference of two pairs'
    scores on the selection set, paired by item.

    Raises LyapunovPruneError for a number that cannot be removed (naming those that can), and for a selection set whose
    error exceeds the differences between all pairs.
    """
    pairs = within_budget(layers, remove, most or (layers, layers))
    predicted = fitted.predict(pairs / layers)
    low, high = fitted.interval(pairs / layers)
    spread = float(np.ptp(predicted))
    if len(pairs) > 1 and selection_error > spread:
        raise LyapunovPruneError(
            f"the selection error, {selection_error:.3g}, exceeds all differences between the {len(pairs)} pairs of "
            f"the budget ({spread:.3g} at most); give more text (--tokens)"
        )
    seeds = over_seeds(repeats)
    quantile = 1 - _RISK / (2 * len(pairs))
    # Compare with the quantile included: a deviation with few degrees of freedom may be small by chance.
    reach = max(stats.t.ppf(quantile, freedom) * sd for sd, freedom in (seeds, fitted.residual) if freedom)
    largest = np.sqrt(fitted.contrast(pairs / layers).max())
    return JointDecision(
        layers=layers,
        remove=remove,
        pairs=pairs,
        predicted=predicted,
        low=low,
        high=high,
        noise=float(reach * largest),
        over_seeds=seeds,
        residual=fitted.residual,
        selection_error=float(selection_error),
        measured_on=fitted.measured_on,
    )


def over_seeds(repeats: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Pooled standard deviation `√(Σ_i Σ_s (y_is − ȳ_i)² / Σ_i (n_i − 1))` and its degrees of freedom."""
    rows = [np.asarray(row, dtype=np.float64) for row in repeats]
    if any(len(row) < 2 or not np.isfinite(row).all() for row in rows):
        raise LyapunovPruneError("every repeated pair needs finite scores of two seeds or more")
    freedom = sum(len(row) - 1 for row in rows)
    squares = sum(float(np.square(row - row.mean()).sum()) for row in rows)
    return (float(np.sqrt(squares / freedom)), freedom) if freedom else (float("nan"), 0)


def within_budget(layers: int, remove: int, most: tuple[int, int]) -> np.ndarray:
    """The pairs of `remove` parts, (m, 2), by attentions removed. Raises LyapunovPruneError if there is none."""
    wrong = {
        f"at most {most[0]} attentions and {most[1]} activations; give 0 to {layers} each": (
            not all(0 <= limit <= layers for limit in most)
        ),
        f"{remove} to remove; give 1 to {sum(most)}: {most[0]} attentions and {most[1]} activations can go": (
            not 1 <= remove <= sum(most)
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)
    n_a, n_g = np.indices((most[0] + 1, most[1] + 1))
    return np.argwhere(n_a + n_g == remove)
