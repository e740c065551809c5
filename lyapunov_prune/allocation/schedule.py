"""The base class of schedules, which turn a model and a budget into an amount for every matrix. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from lyapunov_prune.registry import Choice

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Allocation, Matrices
    from lyapunov_prune.results.result import MeasuredOn

    Amounts = tuple[np.ndarray, Mapping[str, float | str]]

# The largest sparsity of a matrix, because a matrix of zeros has no direction left.
SPARSEST = 0.99


@runtime_checkable  # `allocate` is `checked`
class CostFunction(Protocol):
    """The cost of a bit width in one layer, and the text it is measured on."""

    @property
    def measured_on(self) -> MeasuredOn: ...

    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        """The cost of every layer at each of `widths` bits, (L × widths) float64; smaller is better."""

    def together(self, allocations: Sequence[Allocation]) -> list[float]:
        """The cost of each of `allocations` as a whole, on text that was not used for the cost of single layers."""


class Schedule(Choice):
    """How compression is distributed. A schedule is a subclass in a file of its own and a row in `table.SCHEDULES`.

    Its parameters are its fields. `unit` is what it distributes: "sparsity" or "bits". `needs_cost` says whether it
    goes by a `CostFunction`.
    """

    needs_cost: ClassVar[bool] = False
    unit: ClassVar[Literal["sparsity", "bits"]] = "sparsity"

    def allocate(self, model: PreTrainedModel, budget: float, cost: CostFunction | None = None) -> Allocation:
        """The amount of every matrix; the mean is the budget, or for `BitsKL` at most the budget.

        Raises LyapunovPruneError for a budget that cannot be met.
        """
        from lyapunov_prune.allocation.allocation import Matrices

        matrices = Matrices.of(model)
        amount, parameters = self.amounts(matrices, budget, cost)
        on = () if cost is None else (cost.measured_on,)
        return matrices.allocated(self.name, budget, amount, parameters, on, self.unit)

    def amounts(self, matrices: Matrices, budget: float, cost: CostFunction | None) -> Amounts:
        """The amount of every matrix, (M,) float64, and the parameters that it follows from, by name.

        `cost` is None for a schedule that does not need it. A schedule defines this.
        """
        raise NotImplementedError
