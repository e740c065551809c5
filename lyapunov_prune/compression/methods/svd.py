"""Low rank: the best approximation of a matrix by one of smaller rank (truncated SVD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lyapunov_prune.compression.method import LowRank
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import gram

if TYPE_CHECKING:
    from lyapunov_prune.calibration.statistics import Statistics


@dataclass(frozen=True)
class SVD(LowRank):
    """The rank-`amount` matrix nearest to `W` in spectral and Frobenius norm (Eckart and Young), up to rounding."""

    name = "svd"
    help = "the nearest matrix of lower rank"
    reference = "Eckart and Young, Psychometrika 1, 1936"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        return truncate(W, int(amount), basis(W))


def basis(S: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of the smaller Gram matrix of `S`, float64 on the CPU, largest last: all that a truncation needs.

    Exact enough to truncate by; the norm of what is left is certified from the truncation itself.
    """
    D = S.cpu().double()
    return torch.linalg.eigh(gram(D if D.shape[0] <= D.shape[1] else D.T))[1]


def truncate(S: torch.Tensor, rank: int, vectors: torch.Tensor) -> torch.Tensor:
    """The rank-`rank` matrix nearest to `S` (`SVD`).

    `vectors` is `basis(S)`. `S` itself when it has no more rank.
    """
    if rank >= min(S.shape):
        return S
    D, top = S.cpu().double(), vectors[:, -rank:]
    L = top @ (top.T @ D) if D.shape[0] <= D.shape[1] else (D @ top) @ top.T
    return L.to(S)
