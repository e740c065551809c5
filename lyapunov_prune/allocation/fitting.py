"""Scale or shift targets so that their mean is the budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import require_numbers

# A budget this close outside the attainable range counts as its end, because means are rounded.
ROUNDING = 1e-13
# Largest ratio between targets; beyond it the scale factor loses precision in float64.
SPAN = 1e290


def fit(
    target: np.ndarray, sizes: np.ndarray, budget: float, low: float | np.ndarray = 0.0, high: float | np.ndarray = 1.0
) -> np.ndarray:
    """`clip(c · target, low, high)` with the smallest `c ≥ 0` that meets the budget, (M,) float64.

    `Σ size · clip(c · target, low, high) = budget · Σ size`. The left side is piecewise linear in c, so c is computed
    on one segment between two breakpoints, without iteration. `target` (M,) ≥ 0; `sizes` (M,) > 0; bounds are numbers
    or (M,). The order of targets with equal bounds is preserved. Targets that meet the budget are returned unchanged.

    Raises LyapunovPruneError with the attainable range when no c meets the budget, and for targets that are negative,
    not finite, or too far apart for float64.
    """
    target = np.asarray(target, dtype=np.float64)
    some = target[target > 0]
    require_numbers(target, "targets of an allocation", "check their measurements")
    negative = bool((target < 0).any())
    if negative or (len(some) and some.max() / SPAN > some.min()):
        what = "negative; check their measurements" if negative else "too far apart; bound the schedule"
        least = target.min() if negative else some.min()
        raise LyapunovPruneError(f"targets of an allocation from {least:g} to {target.max():g} are {what}")
    unit = target / some.max() if len(some) else target
    positive = unit > 0
    low, high = _bounds(low, high, unit)
    if _meets(target, sizes, budget, low, high):
        return target
    points = np.concatenate([[0.0], low[positive] / unit[positive], high[positive] / unit[positive]])
    return _solve(lambda c: np.clip(c * unit, low, high), points[points >= 0], sizes, budget)


def shift(target: np.ndarray, sizes: np.ndarray, budget: float, high: float | np.ndarray = 1.0) -> np.ndarray:
    """`clip(target + c, 0, high)` with the c that meets the budget, (M,) float64; otherwise like `fit`.

    Targets may be negative. Any budget from 0 to the mean of `high` can be met.
    """
    target = np.asarray(target, dtype=np.float64)
    require_numbers(target, "targets of an allocation", "check their measurements")
    low, high = _bounds(0.0, high, target)
    if _meets(target, sizes, budget, low, high):
        return target
    points = np.concatenate([low - target, high - target])
    return _solve(lambda c: np.clip(target + c, low, high), points, sizes, budget)


def _bounds(low: float | np.ndarray, high: float | np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.broadcast_to(np.asarray(b, dtype=np.float64), target.shape) for b in (low, high))
    if not (low <= high).all():
        raise LyapunovPruneError("an allocation's lower bound is above its upper bound; change the bounds")
    return low, high


def _meets(target: np.ndarray, sizes: np.ndarray, budget: float, low: np.ndarray, high: np.ndarray) -> bool:
    """Whether `target` already is an allocation of this budget.

    Solving again could change it: next to a matrix at its bound with 10⁹ times the entries, the rounding of the mean is
    10⁻⁷ of the amount of a free matrix.
    """
    within = bool(((low <= target) & (target <= high)).all())
    return within and abs(float(np.average(target, weights=sizes)) - budget) <= ROUNDING


def _solve(amount: Callable[[float], np.ndarray], points: np.ndarray, sizes: np.ndarray, budget: float) -> np.ndarray:
    """`amount(c)` with mean `budget`, for an amount that is monotone in c and linear between `points`."""

    def mean(c: float) -> float:
        return float(np.average(amount(c), weights=sizes))

    points = np.unique(points)
    least, most = mean(points[0]), mean(points[-1])
    if not least - ROUNDING <= budget <= most + ROUNDING:
        raise LyapunovPruneError(
            f"no allocation of this schedule has the mean {budget:.6g}: it reaches {least:.6g} to {most:.6g}; "
            "change the budget or the bounds"
        )
    if budget - least < 1 / SPAN:  # the amounts would lose precision
        return amount(points[0])
    i = bisect_left(points, budget, key=mean)
    if i == len(points):
        return amount(points[-1])
    a, b = points[i - 1], points[i]
    before = mean(a)
    return amount(a + (b - a) * ((budget - before) / (mean(b) - before)))
