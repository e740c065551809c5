"""The second-order update: inputs change one after another, and those still to come make up for each change."""

from __future__ import annotations

from collections.abc import Callable

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch


def swept(
    V: torch.Tensor, U: torch.Tensor, choose: Callable[[int, torch.Tensor], torch.Tensor], block: int
) -> torch.Tensor:
    """Replace every column j of `V` (m × n, float64, in place) by `q_j = choose(j, V)` and move those after it.

    `v_k ← v_k − (v_j − q_j) U_jk / U_jj` for k > j, with the `U` of `inverse_factor(H)`: of all changes of the later
    columns the one of least `tr(E H Eᵀ)` (Hassibi and Stork, NeurIPS 1992; Frantar and Alistarh, SparseGPT, ICML 2023,
    Algorithm 1). When `choose` is called for j, the columns from j to the end of its block of `block` columns have been
    moved by all before j; the columns beyond that block are moved when it is done.
    """
    n = V.shape[1]
    for start in range(0, n, block):
        end = min(start + block, n)
        error = torch.zeros_like(V[:, start:end])
        for j in range(start, end):
            q = choose(j, V)
            error[:, j - start] = (V[:, j] - q) / U[j, j]
            V[:, j:end] -= torch.outer(error[:, j - start], U[j, j:end])
            V[:, j] = q
        V[:, end:] -= error @ U[start:end, end:]
    return V


def inverse_factor(H: torch.Tensor) -> torch.Tensor:
    """The upper triangular `U` with `UᵀU = H⁻¹`: the inverse of the upper triangular `R` with `R Rᵀ = H`.

    `U_jj²` is `[(H_{j:,j:})⁻¹]_jj`. Raises LyapunovPruneError for an `H` (n × n, float64) that has no inverse.
    """
    L, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    if int(info) != 0:
        raise LyapunovPruneError("the Gram matrix has no inverse; give more text or a larger damping")
    identity = torch.eye(len(H), dtype=H.dtype, device=H.device)
    return torch.linalg.solve_triangular(L.flip(0, 1), identity, upper=True)
