"""Bit widths by amplification: the layers whose errors grow most get more bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from lyapunov_prune.allocation.schedule import Schedule
from lyapunov_prune.arguments import Range
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


class Bits(Schedule):
    """`high` bits per weight for the layers of largest `A_l = Π_{k > l} ρ_k`, `low` bits for the others.

    The number of layers with `high` bits makes the mean over all entries equal to the `budget`, in bits; on a tie the
    earlier layer gets `high` bits. The rounding error of layer l is multiplied by `A_l` on its way to the output
    (structural sensitivity, §6.2).

    Raises LyapunovPruneError with the nearest attainable budgets when whole layers do not add up to this one, unless
    the widths are ascending integers from 1 to 16, for a profile of another model, and for a ρ that is not finite or
    not positive.
    """

    low: Annotated[int, Range(1, 16)] = 4
    high: Annotated[int, Range(1, 16)] = 8

    help = "more bits for the layers whose errors grow most"
    reference = "structural sensitivity, §6.2"
    needs = "profile"
    unit = "bits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise LyapunovPruneError(f"bit widths {self.low} and {self.high}; give two from 1 to 16, the lower first")

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        from lyapunov_prune.allocation.amplification import log_amplification

        order = np.argsort(-log_amplification(given), kind="stable")
        entries = np.bincount(matrices.layers, matrices.sizes, len(order))[order]
        wide = np.concatenate([[0.0], np.cumsum(entries)])
        attainable = self.low + (self.high - self.low) * (wide / wide[-1])
        count = int(np.argmin(np.abs(attainable - budget)))
        if not abs(attainable[count] - budget) <= 1e-12 * self.high:
            below, above = attainable[attainable < budget], attainable[attainable > budget]
            nearest = " or ".join(repr(float(b)) for b in (*below[-1:], *above[:1]))
            raise LyapunovPruneError(
                f"whole layers of {self.low} and {self.high} bits have no mean of {budget:g}; give {nearest}"
            )
        amount = np.where(np.isin(matrices.layers, order[:count]), float(self.high), float(self.low))
        return amount, {"low": self.low, "high": self.high}

    def require_choice(self, budget: float) -> None:
        if budget in (self.low, self.high):
            raise LyapunovPruneError(
                f"allocation bits with a mean of {budget:g} gives every layer {budget:g} bits; give a mean between "
                f"{self.low:g} and {self.high:g}, or allocation uniform"
            )
