"""One call for every schedule."""

from __future__ import annotations

from typing import Any

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Streamable, takes_model
from lyapunov_prune.models.hooked import held


@takes_model
def allocate(model: Streamable, schedule: str, budget: float, **parameters: Any) -> Allocation:
    """Distribute the compression over the matrices of `model` by a schedule of `SCHEDULES`, with mean `budget`.

    The budget is a sparsity (`0 ≤ S < 1`). `parameters` are the fields of the schedule. Raises LyapunovPruneError for
    an unknown schedule or parameter, and the errors of the schedule, in particular for a budget that it cannot meet.
    """
    made = SCHEDULES.make(schedule, **parameters)
    if not 0 <= budget < 1:
        raise LyapunovPruneError(f"schedule {schedule} takes no sparsity of {budget:g}; give 0 or more and less than 1")
    with held(model.model):  # a lock: another thread may have swapped weights in
        return made.allocate(model.model, budget)
