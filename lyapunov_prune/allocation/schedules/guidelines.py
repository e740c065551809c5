"""The paper's guidelines: dense MLP inputs in early layers, sparser keys and values, and a ceiling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule
from lyapunov_prune.arguments import NonNegative, Range
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts
    from lyapunov_prune.results.result import MeasuredOn


@runtime_checkable
class Catastrophe(Protocol):
    """A measurement of the threshold s*: a `Sensitivity` with the study `threshold`."""

    @property
    def threshold(self) -> float | None: ...

    @property
    def measured_on(self) -> MeasuredOn: ...

    @property
    def calibrated_on(self) -> MeasuredOn | None: ...


class Guidelines(Schedule):
    """The three rules of structural sensitivity, §6.4 ("Practical compression guidelines").

    - The MLP input matrices (gate, up) of the first `protected` layers stay dense.
    - Keys and values get `extra` more sparsity than the rest.
    - No sparsity exceeds `ceiling`, the catastrophe threshold s* of the model: a number, or the `Sensitivity` that
      measured it (`measure_sensitivity`, study `threshold`), whose texts then count as seen. Measure it on calibration
      text: a ceiling chosen on the evaluation text favours the guidelines there.

    All matrices except the protected ones are shifted together until the mean is the budget. The paper gives the rules
    in words; the values of `extra` and `protected` are ours.

    Raises LyapunovPruneError when the budget is above the ceiling, for a ceiling outside `(0, 0.99]`, a measurement
    without s* or of another model, a negative `extra`, a `protected` that is not a count, and for a model whose keys
    and values, or MLP input matrices to protect, are not known by name.
    """

    ceiling: Annotated[float, Range(0, SPARSEST, above=True)] | Catastrophe = 0.9
    extra: NonNegative = 0.1
    protected: Annotated[int, Range(0)] = 2

    help = "early MLP inputs dense, keys and values sparser, with an upper limit"
    reference = "structural sensitivity, §6.4"

    def seen(self, given: Any) -> tuple[MeasuredOn, ...]:
        if isinstance(self.ceiling, float | int):
            return ()
        return tuple(on for on in (self.ceiling.calibrated_on, self.ceiling.measured_on) if on is not None)

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        from lyapunov_prune.allocation.fitting import shift
        from lyapunov_prune.models.roles import role

        ceiling = self.ceiling if isinstance(self.ceiling, float | int) else _threshold(self.ceiling, matrices)
        roles = np.array([role(p.component) for p in matrices.projections])
        kept = (roles == "mlp-in") & (matrices.layers < self.protected)
        first = np.isin(roles, ("key", "value"))
        if not first.any() or (self.protected and not kept.any()):
            missing = "matrices into its first MLPs" if first.any() else "keys and values"
            raise LyapunovPruneError(f"{matrices.model.name} has no {missing} known by name; use another schedule")
        amount = shift(np.where(first, self.extra, 0.0), matrices.sizes, budget, high=np.where(kept, 0.0, ceiling))
        return amount, {"ceiling": ceiling, "extra": self.extra, "protected": self.protected}


def _threshold(ceiling: Catastrophe, matrices: Matrices) -> float:
    """s*; raises LyapunovPruneError for a measurement without it, or of another model."""
    if ceiling.threshold is None:
        raise LyapunovPruneError(
            "this sensitivity has no s*: its study threshold was not run, or no sparsity kept the regret below the "
            "limit; run it, or give the ceiling as a number"
        )
    matrices.model.require(ceiling.measured_on.model, "s*")
    return ceiling.threshold
