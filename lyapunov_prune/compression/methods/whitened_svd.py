"""Whitened low rank: the matrix of smaller rank whose outputs on calibration text are nearest."""

from __future__ import annotations

from lyapunov_prune.calibration.gram import damped, leading, scaled
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import LowRank
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift


class WhitenedSVD(LowRank):
    """`argmin ‖(W − Ŵ) X‖_F` over `Ŵ` (m × n) of rank `amount`, for inputs X (n × tokens) with `gram = X Xᵀ`.

    With `S Sᵀ = gram + damping · mean(diag) · I` and `[W S]_r = U_r U_rᵀ W S` the truncated SVD,
    `Ŵ = [W S]_r S⁻¹ = U_r U_rᵀ W`, so that `S` needs no inverse, and `‖(W − Ŵ) S‖_F² = Σ_{i>r} σ_i(W S)²`. Wang et al.,
    SVD-LLM (ICLR 2025, arXiv:2403.07378), §3.1; Eckart and Young. `gram` is n × n, float64, in any scale.

    Float64, rounded once to the dtype of `W`, which leaves singular values of the size of that rounding beyond the
    rank. Raises LyapunovPruneError unless `gram` is a Gram matrix of n inputs.
    """

    damping: float = 1e-6

    help = "the matrix of lower rank with the least output error"
    reference = "Wang et al., ICLR 2025, arXiv:2403.07378, §3.1"
    needs = "gram"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        if amount >= min(W.shape):
            return W
        D, exponent = scaled(lift(W))
        return torch.ldexp(self.truncated(D, int(amount), statistics), exponent).to(W)

    def truncated(self, D: torch.Tensor, rank: int, statistics: Statistics | None) -> torch.Tensor:
        """`D` (m × n, float64) at this rank, float64."""
        (gram,) = self.needed(statistics)
        U = leading(D, damped(gram, self.damping, D.device), rank)
        return U @ (U.T @ D)
