"""Criterion `blend`: the growth of an error and the turn of the hidden state, on one scale."""

from __future__ import annotations

from collections.abc import Mapping

from lyapunov_prune.arguments import Share
from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criterion import ByProfile

_ROUNDING = 1e-12  # an IQR below this share of the range counts as zero


class Blend(ByProfile):
    """`α s(|ρ − 1|) + (1 − α) s(bi)`, `s(x) = (x − median) / IQR` over the layers that may go.

    On the paper's scale from 0 to 1 (`blend-minmax`), the single largest value decides how much all others weigh
    (experiments/2_criteria). Raises LyapunovPruneError for an alpha outside [0, 1].
    """

    alpha: Share = 0.5

    help = "alpha rho + (1 - alpha) bi, each scaled by its median and quartiles"
    reference = "structural sensitivity, §6.5; the scale by experiments/2_criteria"
    needs = ("rho", "bi")

    def score(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return self.alpha * self.scale(abs(values["rho"] - 1)) + (1 - self.alpha) * self.scale(values["bi"])

    def scale(self, x: np.ndarray) -> np.ndarray:
        return robust(x)


def robust(x: np.ndarray) -> np.ndarray:
    """`(x − median) / IQR` over the last axis; divided by the range if the IQR is zero; 0 if all are equal."""
    least, low, middle, high, most = np.quantile(x, (0, 0.25, 0.5, 0.75, 1), axis=-1, keepdims=True)
    span = np.where(high - low > _ROUNDING * (most - least), high - low, most - least)
    return (x - middle) / (span + (span == 0))
