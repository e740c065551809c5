"""Criterion `blend-minmax`: the blend of the paper, with each part on a scale from 0 to 1."""

from __future__ import annotations

from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criteria.blend import Blend


class BlendMinMax(Blend):
    """`α s(|ρ − 1|) + (1 − α) s(bi)`, `s(x) = (x − min) / (max − min)` over the layers that may go.

    Raises LyapunovPruneError for an alpha outside [0, 1].
    """

    help = "alpha rho + (1 - alpha) bi, each scaled to 0 to 1"
    reference = "structural sensitivity, §6.5"

    def scale(self, x: np.ndarray) -> np.ndarray:
        return minmax(x)


def minmax(x: np.ndarray) -> np.ndarray:
    """`(x − min) / (max − min)` over the last axis; 0 if all values are equal."""
    low, span = x.min(-1, keepdims=True), np.ptp(x, axis=-1, keepdims=True)
    return (x - low) / (span + (span == 0))
