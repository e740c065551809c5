"""The base class of schedules, which turn a model and a budget into an amount for every matrix. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

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
class ScoreFunction(Protocol):
    """The loss of the model under an allocation, and the text it is measured on."""

    @property
    def measured_on(self) -> MeasuredOn: ...

    def __call__(self, allocation: Allocation) -> float:
        """Mean loss in nats, smaller is better; infinite or NaN for a broken model."""


@runtime_checkable
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

    `needs` names the measurement that it uses: a "batch", a contraction "profile", a "score" of allocations or the
    "cost" of bits; None if it uses none. Its parameters are its fields. `unit` is what it distributes: "sparsity" or
    "bits".
    """

    needs: ClassVar[str | None] = None
    unit: ClassVar[Literal["sparsity", "bits"]] = "sparsity"

    def allocate(self, model: PreTrainedModel, budget: float, given: Any = None) -> Allocation:
        """The amount of every matrix; the mean is the budget, or for `BitWidths` at most the budget.

        `given` is the measurement named by `needs`. Raises LyapunovPruneError for a budget that cannot be met, and for
        a profile of another model.
        """
        from lyapunov_prune.allocation.allocation import Matrices
        from lyapunov_prune.forward.reading import read
        from lyapunov_prune.models.decoder import wrap

        matrices, profile = Matrices.of(model), None
        if self.needs == "profile":
            profile = given
            matrices.model.require(profile.measured_on.model, "the contraction profile")
        elif self.needs == "batch":
            given = read(wrap(model), given)
        amount, parameters = self.amounts(model, matrices, budget, given)
        return matrices.allocated(self.name, budget, amount, parameters, self.seen(given), self.unit, profile)

    def seen(self, given: Any) -> tuple[MeasuredOn, ...]:
        """The texts that the amounts rest on, besides that of a profile."""
        if self.needs in (None, "profile"):
            return ()
        return (given.measured_on() if self.needs == "batch" else given.measured_on,)

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        """The amount of every matrix, (M,) float64, and the parameters that it follows from, by name.

        `given` is the measurement that `allocate` was given; a batch arrives as a `Reading`. A schedule defines this,
        or, if its Allocation holds more, `allocate`.
        """
        raise NotImplementedError

    def require_choice(self, budget: float) -> None:
        """Raise LyapunovPruneError for a budget that leaves no choice, because every matrix must have this amount."""
