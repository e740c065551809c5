"""Gram matrices of calibration vectors: damping, and square roots."""

from __future__ import annotations

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, require_numbers

# A negative eigenvalue of this size, relative to the largest, is not due to rounding.
_NEGATIVE = 1e-8


def damped(gram: torch.Tensor, damping: float, device: torch.device) -> torch.Tensor:
    """`G + damping · mean(diag G) · I` as a new float64 tensor on `device`; scales with G.

    Raises LyapunovPruneError unless `gram` is finite, with a positive mean diagonal.
    """
    G = lift(gram).to(device).clone()
    require_numbers(G, "a Gram matrix: squares of this matrix's inputs overflow float64", "scale them down")
    mean = float(G.diagonal().mean())
    if not mean > 0:
        raise LyapunovPruneError("a Gram matrix is zero: no nonzero input reached this matrix; give more text")
    G.diagonal().add_(damping * mean)
    return G


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x / 2^e` and `e`, with the largest entry in [1/2, 1), so that products stay finite; `x` is float64.

    `e` is an integer tensor on the device of `x`, where `ldexp` needs it.
    """
    exponent = torch.frexp(x.abs().max() if x.numel() else x.new_zeros(())).exponent
    return torch.ldexp(x, -exponent), exponent


def leading(D: torch.Tensor, gram: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading left singular vectors (m × rank) of `D S`, `S Sᵀ = gram`; D is m × n, gram n × n, float64.

    Uses eigenvectors of `D gram Dᵀ`, or of its smaller counterpart if `D` is tall: ten times faster than the SVD, and
    accurate enough for a projection, whose error is quadratic in that of the vectors. Raises as `root` does.
    """
    D, gram = scaled(D)[0], scaled(gram)[0]
    Q, R = torch.linalg.qr(D) if D.shape[0] > D.shape[1] else (None, D)
    vectors = _eigh(R @ gram @ R.T)[1][:, -rank:]
    return vectors if Q is None else Q @ vectors


def root(gram: torch.Tensor) -> torch.Tensor:
    """The symmetric `S` with `S S = gram`, float64; `gram` may be singular.

    Raises LyapunovPruneError if an eigenvalue is clearly negative.
    """
    values, vectors = _eigh(gram)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def _eigh(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    if float(values[0]) < -_NEGATIVE * float(values[-1].abs()):
        raise LyapunovPruneError("not a Gram matrix: it has a negative eigenvalue; collect the statistics again")
    return values, vectors
