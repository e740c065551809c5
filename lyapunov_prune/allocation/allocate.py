"""One call for every schedule."""

from __future__ import annotations

from typing import Any

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.schedule import CostFunction
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models.decoder import Streamable, takes_model
from lyapunov_prune.models.hooked import held


@takes_model
def allocate(
    model: Streamable, schedule: str, budget: float, *, cost: CostFunction | None = None, **parameters: Any
) -> Allocation:
    """Distribute the compression over the matrices of `model` by a schedule of `SCHEDULES`, with mean `budget`.

    The budget is a sparsity (`0 ≤ S < 1`), or a number of bits per weight for schedules of bits. `parameters` are the
    fields of the schedule. A `cost` that the schedule does not need is ignored.

    Raises LyapunovPruneError for an unknown schedule or parameter, a missing cost, and the errors of the schedule, in
    particular for a budget that it cannot meet.
    """
    made = SCHEDULES.make(schedule, **parameters)
    wrong = {
        "needs the cost of bits, which compress measures on its calibration text; give that a batch": (
            made.needs_cost and cost is None
        ),
        f"takes no sparsity of {budget:g}; give 0 or more and less than 1": (
            made.unit == "sparsity" and not 0 <= budget < 1
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"schedule {schedule} {why}")
    with held(model.model):  # a lock: another thread may have swapped weights in
        return made.allocate(model.model, budget, cost if made.needs_cost else None)
