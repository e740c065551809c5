"""Uniform: the same sparsity for every matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


class Uniform(Schedule):
    """`s = S` for every matrix, with `S` the budget (share of the entries set to zero).

    Raises LyapunovPruneError for a budget outside `0 … 0.99`.
    """

    help = "every matrix the same"
    reference = "control"

    def amounts(self, matrices: Matrices, budget: float) -> Amounts:
        from lyapunov_prune.allocation.fitting import fit

        return fit(matrices.sizes > 0, matrices.sizes, budget, high=SPARSEST), {}
