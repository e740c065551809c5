"""The base class of schedules, which turn a model and a budget into an amount for every matrix. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lyapunov_prune.registry import Choice

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Allocation, Matrices

    Amounts = tuple[np.ndarray, Mapping[str, float | str]]

# The largest sparsity of a matrix, because a matrix of zeros has no direction left.
SPARSEST = 0.99


class Schedule(Choice):
    """How sparsity is distributed. A schedule is a subclass in a file of its own and a row in `table.SCHEDULES`.

    Its parameters are its fields.
    """

    def allocate(self, model: PreTrainedModel, budget: float) -> Allocation:
        """The amount of every matrix, whose mean is the budget.

        Raises LyapunovPruneError for a budget that cannot be met.
        """
        from lyapunov_prune.allocation.allocation import Matrices

        matrices = Matrices.of(model)
        return matrices.allocated(self.name, budget, *self.amounts(matrices, budget))

    def amounts(self, matrices: Matrices, budget: float) -> Amounts:
        """The amount of every matrix, (M,) float64, and the parameters that it follows from, by name.

        A schedule defines this.
        """
        raise NotImplementedError
