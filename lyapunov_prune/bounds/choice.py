"""Which of several choices a noisy predictor can be trusted with: the checkers of boundary depth pruning, Theorem 3.

`predicted` has one entry a choice, the largest is picked (of equals the first). Every prediction is within `noise` of
the truth, up to one number common to all choices: by `argmax_add_const` it changes no comparison. The p and q of the
first theorem change places: what is known is the gap of the predictor.
"""

from __future__ import annotations

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck, Numbers, as_array, worst_check
from lyapunov_prune.errors import LyapunovPruneError

# Relative rounding of predictions and of the noise, which are sums of a few float64 products.
_UNIT = 2.0**-40


def argmax_of_noise_lt_half_gap(predicted: Numbers, noise: float) -> bool:
    """Theorem `argmax_of_noise_lt_half_gap`: where `2 noise` is below the gap, the pick is the best in truth.

    The gap is that between the two largest predictions; with a single choice there is nothing to compare. True only
    where the gap is larger by what rounding may account for.
    """
    q = _finite(predicted, noise)
    if len(q) == 1:
        return True
    second, first = np.sort(q)[-2:]
    return bool(first - second > 2 * noise + _UNIT * (np.abs(q).max() + noise))


def regret_of_argmax_le(predicted: Numbers, noise: float, measured: Numbers) -> BoundCheck | None:
    """Theorem `regret_of_argmax_le`: the pick is within `2 noise` of the best, `p(x) − p(picked) ≤ 2 noise` for all x.

    `measured` is the truth p of every choice, NaN where it was not measured; those that were are checked. Half the
    range of `p − q` is the noise that they show, `argmax_add_const` taking its middle away (recovery that stops early
    lowers all scores). None where that is more than `noise`, or the pick was not measured: then nothing was promised.
    """
    q, p = _finite(predicted, noise), as_array(measured)
    if p.shape != q.shape:
        raise LyapunovPruneError(f"{len(p)} measured scores for {len(q)} choices; give NaN where one was not measured")
    picked = int(q.argmax())
    known = np.isfinite(p)
    if not known[picked] or np.ptp((p - q)[known]) / 2 > noise:
        return None
    rounding = _UNIT * (np.abs(q).max() + np.abs(p[known]).max() + noise)
    return worst_check("regret_of_argmax_le", "choice", None, p[known] - p[picked], np.array([2.0 * noise]), rounding)


def _finite(predicted: Numbers, noise: float) -> np.ndarray:
    q = as_array(predicted)
    if not (len(q) and np.isfinite(q).all() and np.isfinite(noise) and noise >= 0):
        raise LyapunovPruneError("predictions must be finite, one or more, and their noise finite and not negative")
    return q
