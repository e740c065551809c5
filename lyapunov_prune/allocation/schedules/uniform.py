"""Uniform: the same sparsity for every matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Allocation


class Uniform(Schedule):
    """`s = S` for every matrix, with `S` the budget (share of the entries set to zero).

    Raises LyapunovPruneError for a budget outside `0 … 0.99`.
    """

    help = "every matrix the same"
    reference = "control"

    def allocate(self, model: PreTrainedModel, budget: float, given: Any = None) -> Allocation:
        from lyapunov_prune.allocation.allocation import Matrices
        from lyapunov_prune.allocation.fitting import fit

        matrices = Matrices.of(model)
        amount = fit(matrices.sizes > 0, matrices.sizes, budget, high=SPARSEST)
        return matrices.allocated("uniform", budget, amount, {})
