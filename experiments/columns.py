"""One model's column of the structural paper's Tables 1 to 4: what it holds, whatever made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from experiments.statements import rank_interval
from lyapunov_prune.evaluation.task_scores import ScoredTask
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class Contraction:
    """ρ of every layer under both poolings, (L,), its 95 % interval under energy pooling, (L, 2), and norm growth K."""

    rho: np.ndarray
    interval: np.ndarray
    rho_token: np.ndarray
    below_floor: tuple[int, ...]
    growth: float
    growth_cv: float
    epsilon: float
    seeds: tuple[int, ...]

    @property
    def contracting(self) -> tuple[int, int]:
        """How many of the L − 1 transitions contract, as the paper counts them."""
        return int((self.rho[:-1] < 1).sum()), len(self.rho) - 1


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over layers with `score`; its 95 % interval by Fisher's z with the standard error of
    Bonett and Wright (Psychometrika 65, 2000), `√((1 + r²/2) / (n − 3))`; `p` of Student's t."""

    score: str
    layers: int
    spearman: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Pruning:
    """Loss of compressed models: 50 % Wanda everywhere, each component alone by two methods, layer 0 alone.

    `uniform`: sparsity to perplexity over dense; `components`: method to component to regret at 50 %; `first_layer`:
    sparsity of layer 0 alone, by Wanda, to regret; `threshold` is s*, the highest that keeps the regret below `limit`.
    """

    degradation: float
    low: float
    high: float
    uniform: dict[str, float]
    components: dict[str, dict[str, float]]
    threshold: float | None
    first_layer: dict[str, float]
    limit: float

    def spread(self, method: str) -> float:
        """Largest over smallest regret of a component; NaN where one costs nothing or less."""
        regrets = np.array(list(self.components[method].values()))
        return float(regrets.max() / regrets.min()) if regrets.min() > 0 else float("nan")


@dataclass(frozen=True)
class Removed:
    """A model without the layers `layers`: perplexity, and its ratio to dense with a 95 % interval paired by window."""

    criterion: str
    count: int
    layers: tuple[int, ...]
    perplexity: float
    degradation: float
    low: float
    high: float


@dataclass(frozen=True)
class Removal:
    """`regret` of every layer removed alone, (L,), what it goes with, and the sets of layers that criteria choose."""

    regret: np.ndarray
    correlations: tuple[Correlation, ...]
    sets: tuple[Removed, ...]


ALPHAS = {0.0: "bi", 0.25: "α = 0.25", 0.5: "blend", 0.75: "α = 0.75", 1.0: "rho"}  # the paper's blend, by its weight


@dataclass(frozen=True)
class Blends:
    """The sets of layers that the blend chooses at those of `ALPHAS` that are no criterion of `Removal`."""

    sets: tuple[Removed, ...]
    measured_on: MeasuredOn


@dataclass(frozen=True)
class Answers:
    """Which items of a task a model gets right, a character an item, 1 or 0.

    `right` goes by log-likelihood, `per_character` by log-likelihood a character (`acc_norm`; empty where the choices
    are beginnings). `criterion` dense: no layer is gone.
    """

    criterion: str
    count: int
    layers: tuple[int, ...]
    task: str
    right: str
    per_character: str

    @property
    def items(self) -> np.ndarray:
        """1 or 0 for every item: by character where there is such a score."""
        return np.array([int(one) for one in self.per_character or self.right])

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        return stats.binomtest(int(self.items.sum()), len(self.items)).proportion_ci(method="wilson")


@dataclass(frozen=True)
class Accuracy:
    """Zero-shot accuracy on the first items of every task, by lm-evaluation-harness."""

    tasks: tuple[ScoredTask, ...]
    answers: tuple[Answers, ...]
    harness: str

    def of(self, criterion: str, count: int) -> list[Answers]:
        """In the order of the tasks; empty where not all have been scored."""
        chosen = {a.task: a for a in self.answers if (a.criterion, a.count) == (criterion, count)}
        return [chosen[t.name] for t in self.tasks] if all(t.name in chosen for t in self.tasks) else []


def mean_accuracy(answers: Sequence[Answers]) -> tuple[float, float, float]:
    """Mean of the accuracies of tasks, and its 95 % interval by the normal law, tasks being independent."""
    return _mean([a.items for a in answers])


def paired_difference(answers: Sequence[Answers], reference: Sequence[Answers]) -> tuple[float, float, float, float]:
    """Mean over tasks of the difference in accuracy, its 95 % interval paired by item, and the exact p of McNemar's
    test over the items of all tasks."""
    differences = [a.items - b.items for a, b in zip(answers, reference, strict=True)]
    better, worse = (sum(int((d == sign).sum()) for d in differences) for sign in (1, -1))
    p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    return (*_mean(differences), float(p))


def _mean(values: Sequence[np.ndarray]) -> tuple[float, float, float]:
    mean = float(np.mean([v.mean() for v in values]))
    error = np.sqrt(sum(v.var(ddof=1) / len(v) for v in values)) / len(values)
    half = float(stats.norm.ppf(0.975) * error)
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class Bounds:
    """The bounds of Theorems 1 to 4, checked on every forward under many settings."""

    checks: int
    violations: int
    settings: int
    measured_on: MeasuredOn


@dataclass(frozen=True)
class Column(Result):
    """What was measured of one model; a part that has not been measured (yet) is None.

    Losses are of the text of `measured_on`; ρ, Block Influence and Wanda's norms of that of `calibrated_on`.
    """

    name: str
    architecture: str
    parameters: int
    layers: int
    width: int
    perplexity: float
    low: float
    high: float
    measured_on: MeasuredOn
    calibrated_on: MeasuredOn
    contraction: Contraction
    removal: Removal | None = None
    blends: Blends | None = None
    pruning: Pruning | None = None
    bounds: Bounds | None = None
    accuracy: Accuracy | None = None

    def to_frame(self) -> pd.DataFrame:
        rows: list[tuple[str, str, float]] = [("dense", "perplexity", self.perplexity)]
        rows.append(("largest rho", f"layer {self.contraction.rho.argmax()}", float(self.contraction.rho.max())))
        for part in (self.removal, self.blends):
            if part is not None:
                rows += [(f"{r.count} removed", r.criterion, r.perplexity) for r in part.sets]
        if self.removal is not None:
            rows += [("Spearman of regret", c.score, c.spearman) for c in self.removal.correlations]
        if self.pruning is not None:
            rows.append(("50 % Wanda", "perplexity / dense", self.pruning.degradation))
            rows.append(("s*", "layer 0", np.nan if self.pruning.threshold is None else self.pruning.threshold))
            rows += [
                ("spread of components", method, self.pruning.spread(method)) for method in self.pruning.components
            ]
        if self.accuracy is not None:
            for kind, count in dict.fromkeys((a.criterion, a.count) for a in self.accuracy.answers):
                if answers := self.accuracy.of(kind, count):
                    rows.append((f"accuracy, {count} removed", kind, mean_accuracy(answers)[0]))
        if self.bounds is not None:
            rows += [("bounds", "checks", self.bounds.checks), ("bounds", "violations", self.bounds.violations)]
        return pd.DataFrame(rows, columns=["what", "of", "value"])

    def headline(self) -> str:
        contracting, transitions = self.contraction.contracting
        return (
            f"{self.name}: {self.layers} layers, width {self.width}, {contracting} of {transitions} transitions "
            f"contract\n{self.measured_on.line()}\ncalibration: {self.calibrated_on.line()}"
        )


def correlation(score: str, values: np.ndarray, against: np.ndarray) -> Correlation:
    """Of two series of one value a layer; NaN where one of them is constant or holds no number."""
    n = len(values)
    if not np.isfinite([values, against]).all() or min(np.ptp(values), np.ptp(against)) == 0 or n < 4:
        return Correlation(score, n, *[float("nan")] * 4)
    r, p = stats.spearmanr(values, against)
    with np.errstate(divide="ignore"):  # a perfect order has no interval but itself
        low, high = rank_interval(r, n)
    return Correlation(score, n, float(r), low, high, float(p))
