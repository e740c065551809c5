"""How far the second-order estimates of the two angles can be off: derived in docs/remainders.md, not proven in Lean.

Arithmetic on float64 numbers that were measured elsewhere, element by element.
"""

from __future__ import annotations

import numpy as np

# Of the computed angle and of the bound, both of a few float64 operations on sums.
ROUNDING = 1e-9


def angle_bounds(parallel: np.ndarray, orthogonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `1 − cos(v, v + Δ)` from `a = ‖Δ∥‖/‖v‖ < 1` and `b = ‖Δ⊥‖/‖v‖`; NaN where `a ≥ 1`.

    `1 − cos = 1 − (1 + t²)^(−1/2)` with `t = b/(1 ± a)`, which lies between `t²/2 − 3t⁴/8` and `t²/2`. The sign is not
    known, so the bounds are the worse of both: `b²/(2(1 + a)²) (1 − 3b²/(4(1 + a)²))`, not below 0, and
    `b²/(2(1 − a)²)`. Their middle is the estimate `b²/2` of Theorem 1 as `a` and `b` go to 0.
    """
    near, far = (np.where(parallel < 1, b, np.nan) for b in (1 - parallel, 1 + parallel))
    with np.errstate(divide="ignore", invalid="ignore"):
        small, large = (orthogonal / far) ** 2, (orthogonal / near) ** 2
    # t²/2 − 3t⁴/8 rises up to t² = 2/3, and the angle rises with t.
    least = np.minimum(small, 2 / 3)
    return least / 2 * (1 - 3 * least / 4), large / 2


def probability_angle_bounds(variance: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bound of `1 − cos(p, q)` from `V = Var_r(d)` and `c = max |d − E_r d|`, `r_i = p_i²/‖p‖²`.

    `cos(p, q) = E_r[e^d] / sqrt(E_r[e^(2d)])` exactly, so that `1 − cos = 1 − sqrt(1 − w)` with `w` the variance of
    `e^d` under r over its second moment, and `e^(−2c) V ≤ w ≤ e^c (sinh c / c)² V`. The bounds are half the first, and
    `1 − sqrt(1 − w)` at the second, or 1. Both are the estimate `V/2` of Theorem 2 as c goes to 0.
    """
    c = np.maximum(deviation, 1e-6)  # a larger c keeps the bound, and the quotient its digits
    with np.errstate(divide="ignore"):
        stretch = c + np.log(-np.expm1(-2 * c) / (2 * c))  # log(sinh c / c), where sinh itself would overflow
        w = np.exp(np.minimum(0.0, c + 2 * stretch + np.log(variance)))
    return np.exp(-2 * deviation) * variance / 2, w / (1 + np.sqrt(1 - w))
