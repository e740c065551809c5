"""SparseGPT: entries go one input at a time, and the inputs still to come make up for each that goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.compression.masks import n_of_m, require_pattern
from lyapunov_prune.compression.method import Sparsifier
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, smallest

if TYPE_CHECKING:
    from lyapunov_prune.calibration.statistics import Statistics


@dataclass(frozen=True)
class SparseGPT(Sparsifier):
    """Zero `round(amount · m · n)` entries of `W` (m × n) and move the others to keep `W X`.

    `H = gram + damping · mean(diag) · I` for the Gram matrix `Σ_t x_t x_tᵀ` (n × n, float64) in any scale. Frantar and
    Alistarh, SparseGPT (ICML 2023, arXiv:2301.00774), Algorithm 1: with `U` upper triangular and `UᵀU = H⁻¹`,
    `U_jj²` is `[(H_{j:,j:})⁻¹]_jj`. For every `block` inputs the entries of smallest `w² / U_jj²` are removed
    among all rows, and for input after input `w_{j:} ← w_{j:} − (w_j / U_jj) U_{j,j:}` in the rows that lose it.
    With `pattern` (keep, of) the `keep` best of every `of` consecutive inputs of a row stay, chosen when the
    first of them is reached.

    Float64 throughout, rounded once to the dtype of `W`. The weights of an input that was always zero become zero,
    beyond the count where there are many.

    Raises LyapunovPruneError for a Gram matrix of another shape, without energy or with no inverse, and for a
    pattern that does not fit the matrix or has another sparsity.
    """

    block: int = 128
    damping: float = 0.01

    name = "sparsegpt"
    help = "entries become zero, the inputs to come make up for them"
    reference = "Frantar and Alistarh, ICML 2023, arXiv:2301.00774, Algorithm 1"
    needs = "gram"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        assert statistics is not None
        assert statistics.gram is not None
        gram, block = statistics.gram, self.block
        m, n = W.shape
        if self.pattern is not None:
            require_pattern(self.pattern, n, amount)
            block = max(block - block % self.pattern[1], self.pattern[1])  # a group lies in one block
        elif round(amount * m * n) == 0:
            return W
        V = lift(W.detach()).clone()
        H = damped(gram, n, self.damping, V.device)
        dead = lift(gram).to(V.device).diagonal() == 0
        H.diagonal()[dead] = 1
        V[:, dead] = 0
        U = _inverse_factor(H)
        scale = U.diagonal().square()
        removed = torch.zeros_like(V, dtype=torch.bool)
        for start in range(0, n, block):
            end = min(start + block, n)
            if self.pattern is None:
                # Counts up to here, so that their rounding does not add up.
                count = round(amount * m * end) - round(amount * m * start)
                removed[:, start:end] = smallest(V[:, start:end].square() / scale[start:end], count)
            error = torch.zeros_like(V[:, start:end])
            for j in range(start, end):
                if self.pattern is not None and j % self.pattern[1] == 0:
                    group = slice(j, j + self.pattern[1])
                    removed[:, group] = n_of_m(V[:, group].square() / scale[group], *self.pattern)
                lost = error[:, j - start] = torch.where(removed[:, j], V[:, j] / U[j, j], 0)
                V[:, j:end] -= torch.outer(lost, U[j, j:end])
            V[:, end:] -= error @ U[start:end, end:]
        return V.masked_fill(removed, 0).to(W)


def _inverse_factor(H: torch.Tensor) -> torch.Tensor:
    """The upper triangular `U` with `UᵀU = H⁻¹`: the inverse of the upper triangular `R` with `R Rᵀ = H`."""
    L, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    if int(info) != 0:
        raise LyapunovPruneError("the Gram matrix has no inverse; give more text or a larger damping")
    identity = torch.eye(len(H), dtype=H.dtype, device=H.device)
    return torch.linalg.solve_triangular(L.flip(0, 1), identity, upper=True)
