"""An approximation `Ŵ` of a matrix `W`, with certified norms of the differences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import CertifiedNorm, certify


@dataclass(frozen=True)
class Approximation:
    """`Ŵ` for one matrix, in the dtype the model will run it in, with certified norms.

    `W = S + (W − S)`, `S = Ŵ + (S − Ŵ)`: a sparse and a low-rank stage, either of which may
    change nothing (norm 0). Any other approximation counts as the sparse stage, because Theorem 2 holds for any S.
    The directions are approximate top right singular vectors of `W − Ŵ` and `W`.
    """

    weight: torch.Tensor
    weight_norm: float  # ‖W‖
    sparse_norm: float  # ‖W − S‖
    low_rank_norm: float  # ‖S − Ŵ‖
    total_norm: float  # ‖W − Ŵ‖
    direction: torch.Tensor
    weight_direction: torch.Tensor


def approximation(
    W: torch.Tensor,
    W_hat: torch.Tensor,
    *,
    sparse: torch.Tensor | None = None,
    weight: CertifiedNorm | None = None,
    sparse_residual: CertifiedNorm | None = None,
) -> Approximation:
    """Certify the norms of the differences when `W_hat` replaces `W`.

    All matrices are output × input. `sparse` is the sparse stage S, if `W_hat` is a low-rank approximation of it;
    `sparse=W` says that `W_hat` approximates `W` itself. Pass `certify(W)` and `certify_difference(W, sparse)` if they
    are known. Raises LyapunovPruneError for another shape, NaN or infinity.
    """
    if W_hat.shape != W.shape:
        raise LyapunovPruneError(f"an approximation of shape {tuple(W_hat.shape)} for a matrix of {tuple(W.shape)}")
    W, W_hat = W.detach(), W_hat.detach().to(W)
    stage = W_hat if sparse is None else sparse.detach().to(W)
    # If one stage changes nothing, the other has the whole residual.
    if torch.equal(stage, W_hat):
        total = sparse_residual or certify_difference(W, W_hat)
        sparse_norm, low_rank_norm = total.bound, 0.0
    else:
        total = certify_difference(W, W_hat)
        if torch.equal(stage, W):
            sparse_norm, low_rank_norm = 0.0, total.bound
        else:
            sparse_norm = (sparse_residual or certify_difference(W, stage)).bound
            low_rank_norm = certify_difference(stage, W_hat).bound
    weight = weight or certify(W)
    return Approximation(
        weight=W_hat,
        weight_norm=weight.bound,
        sparse_norm=sparse_norm,
        low_rank_norm=low_rank_norm,
        total_norm=total.bound,
        direction=total.direction,
        weight_direction=weight.direction,
    )


def certify_difference(W: torch.Tensor, S: torch.Tensor) -> CertifiedNorm:
    """`certify(W − S)`, with an allowance for the rounding of the difference (at most `u ‖W − S‖_F`)."""
    certified = certify(difference(W.detach(), S.detach()))
    return replace(certified, bound=certified.bound * (1 + 2.0**-36))


def difference(W: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    """`W − S` in float64, on the CPU."""
    return torch.sub(W.cpu().double(), S.cpu())  # torch upcasts S
