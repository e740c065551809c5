"""Low rank: the best approximation of a matrix by one of smaller rank (truncated SVD)."""

from __future__ import annotations

import torch

from lyapunov_prune.linalg import gram


def basis(S: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of the smaller Gram matrix of `S`, float64 on the CPU, largest last: all that a truncation needs.

    Exact enough to truncate by; the norm of what is left is certified from the truncation itself.
    """
    D = S.cpu().double()
    return torch.linalg.eigh(gram(D if D.shape[0] <= D.shape[1] else D.T))[1]


def truncate(S: torch.Tensor, rank: int, vectors: torch.Tensor) -> torch.Tensor:
    """The rank-`rank` matrix nearest to `S` in spectral and Frobenius norm (Eckart and Young), but for rounding.

    `vectors` is `basis(S)`. `S` itself when it has no more rank.
    """
    if rank >= min(S.shape):
        return S
    D, top = S.cpu().double(), vectors[:, -rank:]
    L = top @ (top.T @ D) if D.shape[0] <= D.shape[1] else (D @ top) @ top.T
    return L.to(S)
