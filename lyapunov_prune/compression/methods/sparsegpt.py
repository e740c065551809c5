"""SparseGPT: entries are removed one input at a time, and the later inputs compensate for each removal."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import n_of_m, require_pattern
from lyapunov_prune.compression.method import Sparsifier
from lyapunov_prune.compression.second_order import SecondOrder, inverse_factor, swept
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import smallest


class SparseGPT(SecondOrder, Sparsifier):
    """Zero `round(amount · m · n)` entries of `W` (m × n) and update the others to preserve `W X`.

    Uses the `H` of `SecondOrder` for a Gram matrix (n × n, float64) in any scale. Frantar and Alistarh, SparseGPT (ICML
    2023, arXiv:2301.00774), Algorithm 1: with `U` upper triangular and `UᵀU = H⁻¹`, `U_jj²` is `[(H_{j:,j:})⁻¹]_jj`. In
    every `block` inputs the entries of smallest `w² / U_jj²` over all rows are removed. Then, input by input,
    `w_{j:} ← w_{j:} − (w_j / U_jj) U_{j,j:}` in the rows that lose the entry. With `pattern` (keep, of) the `keep` best
    of every `of` consecutive inputs of a row stay, chosen when the first of them is reached.

    Float64 throughout, rounded once to the dtype of `W`. The weights of an input that was always zero become zero, even
    if there are more of them than the count.

    Raises LyapunovPruneError for a Gram matrix of another shape, without energy or without inverse, and for a pattern
    that does not fit the matrix or has another sparsity.
    """

    help = "entries become zero; the remaining inputs compensate them"
    reference = "Frantar and Alistarh, ICML 2023, arXiv:2301.00774, Algorithm 1"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        block, (m, n) = self.block, W.shape
        if self.pattern is not None:
            require_pattern(self.pattern, n, amount)
            block = max(block - block % self.pattern[1], self.pattern[1])  # so that a group lies in one block
        elif round(amount * m * n) == 0:
            return W
        V, H, dead = self.begin(W, statistics)
        V[:, dead] = 0
        U = inverse_factor(H)
        scale = U.diagonal().square()
        removed = torch.zeros_like(V, dtype=torch.bool)

        def zeroed(j: int, V: torch.Tensor) -> torch.Tensor:
            if self.pattern is not None and j % self.pattern[1] == 0:
                group = slice(j, j + self.pattern[1])
                removed[:, group] = n_of_m(V[:, group].square() / scale[group], *self.pattern)
            if self.pattern is None and j % block == 0:
                end = min(j + block, n)
                # The difference of two rounded totals, so that rounding does not add up over blocks.
                count = round(amount * m * end) - round(amount * m * j)
                removed[:, j:end] = smallest(V[:, j:end].square() / scale[j:end], count)
            return V[:, j].masked_fill(removed[:, j], 0)

        return swept(V, U, zeroed, block).to(W)
