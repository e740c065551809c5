"""Selection frequency: how often bootstrap draws of the measured windows pick each layer."""

from __future__ import annotations

import numpy as np

# Scores with a smaller relative difference count as equal up to rounding.
_SAME = 1e-9


def picked(scores: np.ndarray) -> np.ndarray:
    """At [n − 1, l], how often layer l is among the n smallest of `scores` (draws, L); (L, L) float64.

    Of equal scores the earlier layer comes first. A layer without a score (NaN) is never picked.
    """
    ranks = np.argsort(np.argsort(scores, axis=-1, kind="stable"), axis=-1)
    ranks[np.isnan(scores)] = scores.shape[-1]
    return np.array([(ranks < count).mean(0) for count in range(1, scores.shape[-1] + 1)])


def tied(scores: np.ndarray, order: tuple[int, ...], remove: int) -> tuple[int, ...]:
    """The last removed and the first kept layer of `order` if their scores are equal up to rounding; else empty."""
    if remove >= len(order):
        return ()
    last, first = order[remove - 1 : remove + 1]
    a, b = float(scores[last]), float(scores[first])
    return (last, first) if abs(a - b) <= _SAME * max(abs(a), abs(b)) else ()
