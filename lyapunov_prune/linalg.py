"""Linear algebra in float64, shared by every measurement: conversion, energies, spectral norms.

Spectral norms come exact (float64 SVD) or certified from above.

Only a certified norm may be used as a bound in a check. The reasoning, for `A` (p × q, p ≤ q) scaled by a power of two
to `1/2 ≤ max |a_ij| < 1`, with `u = 2⁻⁵³`, `γ_k = k u / (1 − k u)` and `t > 0`:

1. The computed Gram matrix `Ĝ` of `G = A Aᵀ` satisfies `|Ĝ − G| ≤ γ_q |A| |A|ᵀ` entry by entry, in whatever order the
   sums are taken (Higham, Accuracy and Stability, §3.5), so `‖Ĝ − G‖ ≤ γ_q ‖A‖_F²`.
2. `B̂ = fl(t I − Ĝ)` rounds on its diagonal only, by at most `u t`, since `0 ≤ ĝ_ii`.
3. If Cholesky of `B̂` runs to completion, `R̂ᵀ R̂ = B̂ + Δ` with `‖Δ‖ ≤ γ_{p+1}/(1 − γ_{p+1}) tr B̂` (Higham,
   Theorem 10.3 and Demmel's bound; Rump, Verification of positive definiteness, BIT 46, 2006). As
   `R̂ᵀ R̂ ⪰ 0`, `λ_min(B̂) ≥ −‖Δ‖`, and `tr B̂ ≤ p t (1 + u)`.

Together `‖A x‖² ≤ (t + δ) ‖x‖²` for all `x`, with `δ` the sum of the three errors, so `‖A‖ ≤ sqrt(t + δ)` by theorem
`opNorm_le_of_sq_le`. Every `γ` is doubled, for libraries that multiply by a rounded reciprocal instead of dividing.
Nothing depends on how `t` was guessed: a bad guess fails the test or makes the norm larger. The machine is assumed to
have IEEE arithmetic with gradual underflow (the default; not `torch.set_flush_denormal(True)`) and a conventional
matrix product (no Strassen), so this runs on the CPU wherever the matrix is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.lazy import np, torch

WIDER = "load the model in a wider dtype (--dtype float32) or check its weights"

__all__ = ["certified_norm", "exact_norm", "lift", "token_energy", "widen"]

# Numbers converted at once. A larger block would use fresh memory each time, which costs more than the arithmetic.
_AT_ONCE = 2**19
_AT_ONCE_ON_GPU = 2**25


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` exactly in float32 or wider; differences of float16 and bfloat16 values are computed there."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def lift(x: torch.Tensor) -> torch.Tensor:
    """`x` in float64, moved to the CPU if its device lacks that (MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def token_energy(x: torch.Tensor) -> torch.Tensor:
    """`‖x_t‖²` of every token: (…, d) to (…), with squares summed in float64 whatever the dtype of `x`.

    On devices without float64 (MPS) the sum is taken on the CPU.
    """
    flat = (x.cpu() if x.device.type == "mps" else x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    energies = [torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).square() for rows in row_blocks(flat)]
    return torch.cat(energies).view(x.shape[:-1])


def feature_energy(x: torch.Tensor) -> torch.Tensor:
    """`Σ_t x_tj²` of every feature j: (tokens, d) to (d,), summed in float64."""
    return torch.stack([lift(rows).square().sum(0) for rows in row_blocks(x)]).sum(0)


def row_blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows of `x` (m × n) in blocks of a size that is fast to convert or sum."""
    at_once = _AT_ONCE if x.device.type == "cpu" else _AT_ONCE_ON_GPU
    return x.split(max(1, at_once // max(1, x.shape[1])))


_U = 2.0**-53
# Up to this size, computing all eigenpairs costs less than the overhead of ARPACK.
_SMALL = 128
# Relative error of ARPACK's eigenvalue, far below the certificate's margin.
_TOLERANCE = 1e-4
# Rows of a Gram matrix formed at once.
_BLOCK = 192
# The first test adds this share to the guess of ‖A‖²; half of it is the excess of the norm.
_EXCESS = 1e-4


@dataclass(frozen=True)
class CertifiedNorm:
    """`estimate ≤ ‖W‖ ≤ bound`, and a float64 unit vector that nearly attains a bound by the norm.

    The left inequality holds up to rounding. `direction` is the vector `x`, with `‖W x‖ = estimate`.
    """

    bound: float
    estimate: float
    direction: torch.Tensor


@checked
def exact_norm(W: torch.Tensor) -> float:
    """`‖W‖ = σ_1(W)` of a matrix (any float dtype) by a float64 SVD, exact up to rounding.

    The rounding may go either way, so this is not a bound. Raises LyapunovPruneError for NaN, infinity and anything but
    a matrix.
    """
    A, exponent = _scaled(W)
    return _unscaled(float(torch.linalg.svdvals(A)[0]), exponent, up=False) if A.numel() else 0.0


@checked
def certified_norm(W: torch.Tensor) -> float:
    """An upper bound of `‖W‖` in float64 that includes all rounding; within 0.1 % of the norm.

    `W` is a matrix of any float dtype and scaling; an empty one has norm 0. A guess `t` of `‖W‖²` is raised until
    Cholesky, with a rounding margin (see the module's docstring), shows that `t I − W Wᵀ` is positive semidefinite; the
    norm follows by `opNorm_le_of_sq_le`. If `min(‖W‖_F, sqrt(‖W‖_1 ‖W‖_∞))`, rounded up, is smaller, it is used
    instead. By `bound_of_upper_bound` and `error_le_of_certified_norm` the result may replace the norm in every bound.

    Raises LyapunovPruneError for NaN, infinity, anything but a matrix, or a norm beyond float64.
    """
    return certify(W).bound


def certify(W: torch.Tensor) -> CertifiedNorm:
    """`certified_norm(W)` with the direction found on the way (theorem `opNorm_le_of_sq_le`)."""
    wide = W.ndim == 2 and W.shape[0] <= W.shape[1]
    A, exponent = _scaled(W)
    if not A.any():
        columns = W.shape[1]
        return CertifiedNorm(0.0, 0.0, torch.full((columns,), columns**-0.5 if columns else 0.0, dtype=torch.float64))
    bound = _entrywise_bound(A)
    if len(A) == 1:
        x = torch.ones(1, dtype=torch.float64)
    else:
        G = gram(A)
        if len(A) <= _SMALL:
            values, vectors = torch.linalg.eigh(G)
            guess, x = float(values[-1]), vectors[:, -1]
        else:
            from scipy.sparse.linalg import eigsh

            start = torch.randn(len(A), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            values, vectors = eigsh(G.numpy(), k=1, v0=start.numpy(), tol=_TOLERANCE)
            guess, x = float(values[0]), torch.from_numpy(vectors[:, 0])
        bound = min(bound, _gram_bound(G, A.shape[1], guess, bound))
    # x is a left singular vector of the wide A; W stretches x or Aᵀ x most.
    stretched = A.T @ x
    estimate = float(torch.linalg.vector_norm(stretched))
    if wide:
        x = stretched / estimate
    return CertifiedNorm(_unscaled(bound, exponent, up=True), _unscaled(estimate, exponent, up=False), x)


def gram(A: torch.Tensor) -> torch.Tensor:
    """`A Aᵀ` (p × p, dtype of `A`) of a matrix (p × q): the lower half in blocks of rows, the rest by symmetry.

    Takes two thirds of the time of the whole product.
    """
    G = A.new_empty(len(A), len(A))
    for start in range(0, len(A), _BLOCK):
        stop = start + _BLOCK
        low = A[start:stop] @ A[:stop].T
        G[start:stop, :stop] = low
        G[:start, start:stop] = low[:, :start].T
    return G


def basis(S: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of the smaller Gram matrix of `S`, float64 on the CPU, largest last, for `truncate`.

    Accurate enough to truncate with; the norm of the remainder is certified from the truncation itself.
    """
    D = S.cpu().double()
    return torch.linalg.eigh(gram(D if D.shape[0] <= D.shape[1] else D.T))[1]


def truncate(S: torch.Tensor, rank: int, vectors: torch.Tensor) -> torch.Tensor:
    """The rank-`rank` matrix nearest to `S` (m × n) in spectral and Frobenius norm.

    `vectors` is `basis(S)`. Returns `S` itself if its rank is no larger.
    """
    if rank >= min(S.shape):
        return S
    D, top = S.cpu().double(), vectors[:, -rank:]
    L = top @ (top.T @ D) if D.shape[0] <= D.shape[1] else (D @ top) @ top.T
    return L.to(S)


def smallest(score: torch.Tensor, count: int) -> torch.Tensor:
    """True at the `count` smallest entries of `score` (any shape) overall; ties go by row-major order."""
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    flat = score.flatten()
    limit = flat.kthvalue(count).values
    removed = flat < limit
    ties = (flat == limit).nonzero().flatten()[: count - int(removed.sum())]
    removed[ties] = True
    return removed.view(score.shape)


def all_finite(values: torch.Tensor | np.ndarray) -> bool:
    """Whether no entry is NaN or infinite."""
    if not math.prod(values.shape):
        return True
    # The extremes are NaN if any entry is; isfinite on all entries takes fifty times as long.
    least, most = torch.aminmax(values.detach()) if isinstance(values, torch.Tensor) else (values.min(), values.max())
    return math.isfinite(least) and math.isfinite(most)


def require_numbers(values: torch.Tensor | np.ndarray, what: str, remedy: str = WIDER) -> None:
    """Raise LyapunovPruneError, which says `what` the `values` are, if one of them is NaN or infinite."""
    if not all_finite(values):
        place = next(i for i, x in enumerate(values.reshape(-1).tolist()) if not math.isfinite(x))
        raise LyapunovPruneError(f"NaN or infinity in {what} (number {place}); {remedy}")


def _scaled(W: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`W` or its transpose as a wide float64 matrix `A` on the CPU with `W = A · 2^exponent`, max |a| in [1/2, 1).

    Entries below 2⁻¹⁰²² may be rounded, by an amount within the margins of this module.
    """
    if W.ndim != 2 or not W.is_floating_point():
        raise LyapunovPruneError(f"a norm needs a real matrix, not {W.dtype} of shape {tuple(W.shape)}")
    A = W.detach().cpu().double()
    require_numbers(A, f"a matrix of shape {tuple(W.shape)}, which has no norm")
    largest = float(torch.stack(torch.aminmax(A)).abs().max()) if A.numel() else 0.0
    if A.shape[0] > A.shape[1]:
        A = A.T
    exponent = math.frexp(largest)[1]
    half = -exponent // 2  # 2^1074 exceeds float64, but its root does not
    return (A * 2.0**half).mul_(2.0 ** (-exponent - half)), exponent


def _unscaled(norm: float, exponent: int, up: bool) -> float:
    with reported("the norm of a matrix is beyond float64", "scale the matrix down", OverflowError):
        result = math.ldexp(norm, exponent)
    # Subnormal numbers are rounded when scaled; others are not.
    return math.nextafter(result, math.inf) if up and result < 2.0**-1021 else result


def _gamma(k: int) -> float:
    """Twice `γ_k`."""
    return 2 * k * _U / (1 - 2 * k * _U)


def _entrywise_bound(A: torch.Tensor) -> float:
    """`min(‖A‖_F, sqrt(‖A‖_1 ‖A‖_∞))`, rounded up; sums of k nonnegative terms are accurate within `γ_k`."""
    entries = A.abs()
    frobenius = float(torch.linalg.vector_norm(A)) * (1 + _gamma(A.numel() + 4))
    mixed = math.sqrt(float(entries.sum(0).max()) * float(entries.sum(1).max())) * (1 + _gamma(sum(A.shape) + 4))
    return min(frobenius, mixed)


def _gram_bound(G: torch.Tensor, inner: int, guess: float, limit: float) -> float:
    """A certified `sqrt(t + δ)`, close to the least; infinity if the test does not pass below `limit`."""
    size = len(G)
    identity = torch.eye(size, dtype=torch.float64)
    trace = float(G.diagonal().sum())
    excess, exact = _EXCESS, size <= _SMALL
    while (t := guess * (1 + excess)) < limit**2:
        factor, info = torch.linalg.cholesky_ex(t * identity - G)
        if int(info) == 0 and bool(factor.diagonal().isfinite().all()):
            # Gram (with underflow, which is far below u t), the diagonal, Cholesky.
            delta = 1.01 * (_gamma(inner) * trace + 8 * _U * t + 1.01 * _gamma(size + 1) * size * t)
            return math.sqrt(t + delta) * (1 + 8 * _U)
        if exact:
            excess *= 8
        else:  # the guess was too low
            guess, exact = float(torch.linalg.eigvalsh(G)[-1]), True
    return math.inf
