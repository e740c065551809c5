"""ATP: sparsities in arithmetic progression, with the first layer the densest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule
from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


def steepest(budget: float, num_layers: int) -> float:
    """The largest common difference: `min(2S, 2(1 − S)) / (L − 1)`, where an end reaches 0 or 1; 0 for one layer."""
    return min(2 * budget, 2 * (1 - budget)) / (num_layers - 1) if num_layers > 1 else 0.0


class ATP(Schedule):
    """`s_l = S − β (L − 1) / 2 + β l` for `l = 0 … L − 1`, `S` the budget, `0 ≤ β ≤ min(2S, 2(1 − S)) / (L − 1)`.

    Huang et al., Determining layer-wise sparsity for large language models through a theoretical perspective (ICML
    2025, arXiv:2502.14770). The paper searches for the β of lowest perplexity; the default here is half
    of the largest β, which no experiment supports. Layers of unequal size are shifted together until the mean is the
    budget, and none exceeds 0.99.

    Raises LyapunovPruneError for β outside its range and a budget outside `0 … 0.99`.
    """

    beta: float | None = None

    help = "sparsity in arithmetic progression, with the first layer densest"
    reference = "Huang et al., ICML 2025, arXiv:2502.14770"

    def amounts(self, matrices: Matrices, budget: float) -> Amounts:
        from lyapunov_prune.allocation.fitting import shift

        L = matrices.model.num_layers
        largest = steepest(budget, L)
        beta = largest / 2 if self.beta is None else self.beta
        if not 0 <= beta <= largest:
            raise LyapunovPruneError(f"beta {beta:g} is outside 0 to {largest:.6g}, where sparsities of 0 to 1 end")
        target = budget - beta * (L - 1) / 2 + beta * matrices.layers
        amount = shift(target, matrices.sizes, budget, high=SPARSEST)
        return amount, {"beta": beta}
