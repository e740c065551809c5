"""Uniform: the same sparsity for every matrix."""

from __future__ import annotations

from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import SPARSEST, Allocation, Matrices, require_sparsity
from lyapunov_prune.allocation.fitting import fit


def uniform(model: PreTrainedModel, budget: float) -> Allocation:
    """`s = S` for every matrix, with `S` the budget (share of the entries set to zero).

    Raises LyapunovPruneError for a budget outside `0 … 0.99`.
    """
    require_sparsity(budget)
    matrices = Matrices.of(model)
    amount = fit(matrices.sizes > 0, matrices.sizes, budget, high=SPARSEST)
    return matrices.allocated("uniform", budget, amount, {})
