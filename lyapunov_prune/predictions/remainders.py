"""Error bounds of the second-order estimates of the angles, derived in docs/remainders.md (not proven in Lean).

Elementwise arithmetic on float64 arrays of measurements.
"""

from __future__ import annotations

import numpy as np

# Relative rounding of the computed angle and of the bound, a few float64 operations each.
ROUNDING = 1e-9


def angle_bounds(parallel: np.ndarray, orthogonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `1 − cos(v, v + Δ)` from `a = ‖Δ∥‖/‖v‖ < 1` and `b = ‖Δ⊥‖/‖v‖`; NaN where `a ≥ 1`.

    `1 − cos = 1 − (1 + t²)^(−1/2)` with `t = b/(1 ± a)` lies between `t²/2 − 3t⁴/8` and `t²/2`. The sign of ±a is
    unknown, so both bounds take the worse one: `max(0, b²/(2(1 + a)²) (1 − 3b²/(4(1 + a)²)))` and `b²/(2(1 − a)²)`.
    Both approach the estimate `b²/2` of Theorem 1 as `a` and `b` go to 0.
    """
    near, far = (np.where(parallel < 1, b, np.nan) for b in (1 - parallel, 1 + parallel))
    with np.errstate(divide="ignore", invalid="ignore"):
        small, large = (orthogonal / far) ** 2, (orthogonal / near) ** 2
    # t²/2 − 3t⁴/8 increases up to t² = 2/3, and the angle increases with t.
    least = np.minimum(small, 2 / 3)
    return least / 2 * (1 - 3 * least / 4), large / 2


def probability_angle_bounds(variance: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `1 − cos(p, q)` from `V = Var_r(d)` and `c = max |d − E_r d|`, `r_i = p_i²/‖p‖²`.

    `cos(p, q) = E_r[e^d] / sqrt(E_r[e^(2d)])` exactly, so `1 − cos = 1 − sqrt(1 − w)`, where `w` is the variance of
    `e^d` under r divided by its second moment, and `e^(−2c) V ≤ w ≤ e^c (sinh c / c)² V`. The lower bound is half of
    the lower end of w; the upper bound is `1 − sqrt(1 − w)` at its upper end, at most 1. Both approach the estimate
    `V/2` of Theorem 2 as c goes to 0.
    """
    c = np.maximum(deviation, 1e-6)  # a larger c keeps the bound valid and avoids cancellation
    with np.errstate(divide="ignore"):
        stretch = c + np.log(-np.expm1(-2 * c) / (2 * c))  # log(sinh c / c) without overflow
        w = np.exp(np.minimum(0.0, c + 2 * stretch + np.log(variance)))
    return np.exp(-2 * deviation) * variance / 2, w / (1 + np.sqrt(1 - w))
