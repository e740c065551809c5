"""Checkers for a choice by a noisy predictor (boundary depth pruning, Theorem 3).

`predicted` has one entry per choice; the largest is picked, the first one on a tie. Every prediction is within `noise`
of the truth, up to a constant common to all choices, which changes no comparison (`argmax_add_const`). The roles of p
and q in the theorem are exchanged, because the known gap is that of the predictor.
"""

from __future__ import annotations

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck, Numbers, as_array, worst_check
from lyapunov_prune.errors import LyapunovPruneError

# Relative rounding of predictions and noise, sums of a few float64 products.
_UNIT = 2.0**-40


def argmax_of_noise_lt_half_gap(predicted: Numbers, noise: float) -> bool:
    """Theorem `argmax_of_noise_lt_half_gap`: if `2 noise` is below the gap, the pick is the best choice.

    The gap is the difference of the two largest predictions; a single choice is always the best. True only if the gap
    is larger by more than rounding.
    """
    q = _finite(predicted, noise)
    if len(q) == 1:
        return True
    second, first = np.sort(q)[-2:]
    return bool(first - second > 2 * noise + _UNIT * (np.abs(q).max() + noise))


def regret_of_argmax_le(predicted: Numbers, noise: float, measured: Numbers) -> BoundCheck | None:
    """Theorem `regret_of_argmax_le`: the pick is within `2 noise` of the best, `p(x) − p(picked) ≤ 2 noise` for all x.

    `measured` is the true p of every choice, NaN where it was not measured; only measured choices are checked. Their
    observed noise is half the range of `p − q`, because `argmax_add_const` removes the midpoint (for example when a
    recovery that stops early lowers all scores). Returns None if it exceeds `noise` or if the pick was not measured:
    then the theorem does not apply.
    """
    q, p = _finite(predicted, noise), as_array(measured)
    if p.shape != q.shape:
        raise LyapunovPruneError(f"{len(p)} measured scores for {len(q)} choices; give NaN where one was not measured")
    picked = int(q.argmax())
    known = np.isfinite(p)
    if not known[picked] or np.ptp((p - q)[known]) / 2 > noise:
        return None
    rounding = _UNIT * (np.abs(q).max() + np.abs(p[known]).max() + noise)
    error, bound = p[known] - p[picked], np.array([2.0 * noise])
    return worst_check("regret_of_argmax_le", error, bound, rounding=rounding, matrix="choice")


def _finite(predicted: Numbers, noise: float) -> np.ndarray:
    q = as_array(predicted)
    if not (len(q) and np.isfinite(q).all() and np.isfinite(noise) and noise >= 0):
        raise LyapunovPruneError("predictions must be finite, one or more, and their noise finite and not negative")
    return q
