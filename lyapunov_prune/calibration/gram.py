"""Gram matrices of calibration vectors: damped until they have an inverse, and their square roots."""

from __future__ import annotations

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift

# Eigenvalues this far below zero, over the largest, are no rounding.
_NEGATIVE = 1e-8


def damped(gram: torch.Tensor, size: int, damping: float, device: torch.device) -> torch.Tensor:
    """`G + damping · mean(diag G) · I`, a new float64 tensor on `device`: the same for every scale of G but for it.

    Raises LyapunovPruneError unless `gram` is size × size, finite, with a positive diagonal mean.
    """
    if gram.shape != (size, size):
        raise LyapunovPruneError(f"a Gram matrix of {tuple(gram.shape)} where {size} × {size} is needed")
    G = lift(gram).to(device).clone()
    if not G.isfinite().all():
        raise LyapunovPruneError(
            "a Gram matrix holds NaN or infinity: squares of what reaches this matrix are beyond float64; scale it down"
        )
    mean = float(G.diagonal().mean())
    if not mean > 0:
        raise LyapunovPruneError("a Gram matrix without energy: nothing reached this matrix; give more text")
    G.diagonal().add_(damping * mean)
    return G


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` (float64) over `2^e`, and `e`: its largest entry lies in [1/2, 1), so that products of it are finite."""
    exponent = int(torch.frexp(x.abs().max()).exponent) if x.numel() else 0
    return torch.ldexp(x, torch.tensor(-exponent)), exponent


def leading(D: torch.Tensor, gram: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading left singular vectors of `D S`, `S Sᵀ = gram` (m × n and n × n, float64): m × rank.

    Eigenvectors of `D gram Dᵀ`, or of its part in the columns of a tall `D`: a tenth of the time of the SVD, and
    exact enough to project on, as an error of the vectors enters that of the projection squared. Raises as `root`.
    """
    D, gram = scaled(D)[0], scaled(gram)[0]
    Q, R = torch.linalg.qr(D) if D.shape[0] > D.shape[1] else (None, D)
    vectors = _eigh(R @ gram @ R.T)[1][:, -rank:]
    return vectors if Q is None else Q @ vectors


def root(gram: torch.Tensor) -> torch.Tensor:
    """The symmetric `S` with `S S = gram`, float64; a singular Gram matrix has one too.

    Raises LyapunovPruneError where an eigenvalue is clearly negative: no Gram matrix then.
    """
    values, vectors = _eigh(gram)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def _eigh(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    if float(values[0]) < -_NEGATIVE * float(values[-1].abs()):
        raise LyapunovPruneError("not a Gram matrix: it has a negative eigenvalue; collect the statistics again")
    return values, vectors
