"""Checkers of the bounds on `KL(p‖q)` between probabilities whose logits differ.

`p = softmax(z/T)`, `q = softmax((z + Δz)/T)` and `d = Δz/T`; a constant added to `d` changes nothing.
"""

from __future__ import annotations

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck, Numbers, as_array, worst_check
from lyapunov_prune.errors import LyapunovPruneError

# Relative rounding of float64 sums over a vocabulary, and of log-probabilities down to e⁻²⁵⁶.
_UNIT = 2.0**-44


def kl_softmax_le_range(kl: Numbers, span: Numbers, *, matrix: str = "", layer: int | None = None) -> BoundCheck:
    """Theorem `kl_softmax_le_range`: `KL(p‖q) ≤ max d − min d`, for any change of the logits.

    `kl` and `span = max d − min d` have one entry per input, in nats, computed in float64. With `u = log q − log p`
    known within `δ`, `KL = Σ p (eᵘ − 1 − u)` is known within `δ Σ p|u| ≤ δ span`; a common shift of `u` enters squared.
    """
    S = as_array(span)
    return worst_check("kl_softmax_le_range", kl, S, rounding=_UNIT * (S + _UNIT), matrix=matrix, layer=layer)


def kl_softmax_le_variance(
    kl: Numbers, variance: Numbers, deviation: Numbers, *, matrix: str = "", layer: int | None = None
) -> BoundCheck:
    """Theorem `kl_softmax_le_variance`: `KL(p‖q) ≤ (1/2 + 2c/9) Var_p(d)` when `|d_i − E_p d| ≤ c ≤ 1` for all i.

    `kl`, `variance = Var_p(d)` and `deviation = c` have one entry per input, computed in float64. The margin is that of
    `kl_softmax_le_range` with `Σ p|u| ≤ √Var + KL`. Raises LyapunovPruneError if `c > 1`, because the theorem does not
    apply then.
    """
    V, c = as_array(variance), as_array(deviation)
    if (c > 1).any():
        raise LyapunovPruneError(f"a change deviates by c = {c.max():.4g} from its mean; the bound needs c ≤ 1")
    rounding = _UNIT * (np.sqrt(V) + np.abs(as_array(kl)) + _UNIT)
    bound = variance_bound(V, c)
    return worst_check("kl_softmax_le_variance", kl, bound, rounding=rounding, matrix=matrix, layer=layer)


def variance_bound(variance: Numbers, deviation: Numbers) -> np.ndarray:
    """`(1/2 + 2c/9) Var_p(d)` of each input; NaN where `c > 1`."""
    V, c = as_array(variance), as_array(deviation)
    return np.where(c <= 1, (1 / 2 + 2 * c / 9) * V, np.nan)
