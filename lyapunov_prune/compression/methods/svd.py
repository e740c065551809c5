"""Low rank: the best approximation of a matrix by one of smaller rank (truncated SVD)."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import LowRank
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import basis, truncate


class SVD(LowRank):
    """The rank-`amount` matrix nearest to `W` in spectral and Frobenius norm (Eckart and Young), up to rounding."""

    help = "the nearest matrix of lower rank"
    reference = "Eckart and Young, Psychometrika 1, 1936"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        return truncate(W, int(amount), basis(W))
