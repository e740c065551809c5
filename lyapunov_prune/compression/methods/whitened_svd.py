"""Whitened low rank: the matrix of smaller rank whose outputs on calibration text are nearest."""

from __future__ import annotations

import torch

from lyapunov_prune.calibration.gram import damped, leading, scaled
from lyapunov_prune.linalg import lift


def whitened(W: torch.Tensor, gram: torch.Tensor, rank: int, *, damping: float = 1e-6) -> torch.Tensor:
    """`argmin ‖(W − Ŵ) X‖_F` over `Ŵ` (m × n) of rank `rank`, for inputs X (n × tokens) with `gram = X Xᵀ`.

    With `S Sᵀ = gram + damping · mean(diag) · I` and `[W S]_r = U_r U_rᵀ W S` the truncated SVD,
    `Ŵ = [W S]_r S⁻¹ = U_r U_rᵀ W`, so that `S` needs no inverse, and `‖(W − Ŵ) S‖_F² = Σ_{i>r} σ_i(W S)²`. Wang et
    al., SVD-LLM (ICLR 2025, arXiv:2403.07378), §3.1; Eckart and Young. `gram` is n × n, float64, in any scale.

    Float64, rounded once to the dtype of `W`, which leaves directions of the size of that rounding beyond the rank.
    `W` itself when it has no more rank. Raises LyapunovPruneError for what is no Gram matrix of n inputs.
    """
    if rank >= min(W.shape):
        return W
    D, exponent = scaled(lift(W.detach()))
    U = leading(D, damped(gram, D.shape[1], damping, D.device), rank)
    return torch.ldexp(U @ (U.T @ D), torch.tensor(exponent)).to(W)
