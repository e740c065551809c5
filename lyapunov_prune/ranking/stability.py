"""How firm a choice of layers is: how often each is picked when the windows that it was measured on are drawn anew."""

from __future__ import annotations

import numpy as np

# Scores that differ by less, as a share of the larger, are one score, rounded twice.
_SAME = 1e-9


def picked(scores: np.ndarray) -> np.ndarray:
    """How often layer l is among the n with the smallest of `scores` (draws, L), at [n − 1, l]; (L, L) float64.

    Of equal scores the first goes first. A layer without one (NaN) is never picked.
    """
    ranks = np.argsort(np.argsort(scores, axis=-1, kind="stable"), axis=-1)
    ranks[np.isnan(scores)] = scores.shape[-1]
    return np.array([(ranks < count).mean(0) for count in range(1, scores.shape[-1] + 1)])


def tied(scores: np.ndarray, order: tuple[int, ...], remove: int) -> tuple[int, ...]:
    """The last of `order` that goes and the first that stays, where their scores are one; else nothing."""
    if remove >= len(order):
        return ()
    last, first = order[remove - 1 : remove + 1]
    a, b = float(scores[last]), float(scores[first])
    return (last, first) if abs(a - b) <= _SAME * max(abs(a), abs(b)) else ()
