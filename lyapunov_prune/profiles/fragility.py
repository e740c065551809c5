"""The compression fragility index: does instability, against width, say which model bears compression?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.contraction_profile import ContractionProfile

WIDTH = 768  # GPT-2 Small's, whose width penalty is 1
# A fit of three numbers to three models has no error to speak of; one more is left out each time.
FEWEST = 5


@checked
def compression_fragility(profile: ContractionProfile, width: int, *, alpha: float = 1.0, beta: float = 1.0) -> float:
    """`CFI = (max_l ρ_l)^α (768 / d)^β`: instability × width penalty, larger is more fragile.

    The form is this project's: of the paper's heuristic (structural sensitivity, §6.6, Appendix F) the text has kept
    the two terms and that α and β were fitted to six models, and lost the formula and both numbers. α = β = 1 are no
    fit; `fit_fragility` makes one. The pooling is that of `profile`.

    Raises LyapunovPruneError for a width below 1 or a profile that is all rounding.
    """
    profile.require_above_floor()
    return _index(FragilityPoint("", float(np.nanmax(profile.rho)), width, 1.0), alpha, beta)


@dataclass(frozen=True)
class FragilityPoint:
    """One model: its largest ρ, its width d, and the harm that compression does it (degradation at one setting)."""

    model: str
    instability: float
    width: int
    harm: float

    def __post_init__(self) -> None:
        if not (self.width >= 1 and self.instability > 0 and self.harm > 0 and np.isfinite(self.harm)):
            raise LyapunovPruneError(
                f"{self}: the index needs a width of 1 or more, and a largest rho and a finite harm above 0"
            )


@dataclass(frozen=True)
class FragilityFit:
    """α and β of the index over `points`, how it ranks them, and how it ranks each that the fit has not seen.

    `rank_errors[i]` is how many places model i is off when its harm is predicted from the fit to all others and put
    among their harms. With fewer than five models α, β, and all that follows from them are NaN, and `str` says so.
    """

    points: tuple[FragilityPoint, ...]
    alpha: float
    beta: float
    spearman: float
    rank_errors: np.ndarray

    def __str__(self) -> str:
        n = len(self.points)
        if np.isnan(self.alpha):
            return (
                f"Compression fragility of {n} models: three numbers are fitted, and with fewer than {FEWEST} models "
                "there is no fit to leave one out of and no correlation to speak of; measure more models"
            )
        worst = int(np.argmax(self.rank_errors))
        return (
            f"Compression fragility, (max rho)^{self.alpha:.3g} (768/d)^{self.beta:.3g}, fitted to {n} models: "
            f"Spearman {self.spearman:+.2f} with the harm it was fitted to; left out one by one, mean rank error "
            f"{self.rank_errors.mean():.2g}, largest {self.rank_errors[worst]:.0f} ({self.points[worst].model}). "
            f"{n} points: an observation, no predictor"
        )


@checked
def fit_fragility(points: Sequence[FragilityPoint]) -> FragilityFit:
    """Least squares of `log harm = c + α log max ρ + β log(768/d)`, and the same without each model in turn.

    Structural sensitivity, Appendix F (fitted to six models; left out one by one, mean rank error 1.0, at most 3).
    Models are ranked by harm with ties at their mean.
    """
    if len(points) < FEWEST:
        return FragilityFit(tuple(points), np.nan, np.nan, np.nan, np.full(len(points), np.nan))
    harm = np.log([p.harm for p in points])
    terms = np.array([[1.0, np.log(p.instability), np.log(WIDTH / p.width)] for p in points])
    _, alpha, beta = np.linalg.lstsq(terms, harm, rcond=None)[0]
    index = [_index(p, alpha, beta) for p in points]
    errors = []
    for i in range(len(points)):
        others = np.arange(len(points)) != i
        predicted = harm.copy()
        predicted[i] = terms[i] @ np.linalg.lstsq(terms[others], harm[others], rcond=None)[0]
        errors.append(abs(stats.rankdata(predicted)[i] - stats.rankdata(harm)[i]))
    alike = min(len(set(index)), len(set(harm))) < 2  # a constant has no ranks
    spearman = np.nan if alike else float(stats.spearmanr(index, harm).statistic)
    return FragilityFit(tuple(points), float(alpha), float(beta), spearman, np.array(errors))


def _index(point: FragilityPoint, alpha: float, beta: float) -> float:
    return float(point.instability**alpha * (WIDTH / point.width) ** beta)
