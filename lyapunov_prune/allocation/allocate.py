"""One call for every schedule."""

from __future__ import annotations

from typing import Any

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.schedule import CostFunction, ScoreFunction
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.models.decoder import Streamable, takes_model
from lyapunov_prune.models.hooked import held
from lyapunov_prune.profiles.contraction_profile import ContractionProfile

REMEDIES = {
    "batch": "a calibration batch; give batch",
    "profile": "a contraction profile; measure one and give it",
    "cost": "the cost of bits, which compress measures on its calibration text; give that a batch",
    "score": "a score of allocations, which compress makes of its calibration text; give that a batch",
}


@takes_model
def allocate(
    model: Streamable,
    schedule: str,
    budget: float,
    *,
    batch: Readable | None = None,
    profile: ContractionProfile | None = None,
    score: ScoreFunction | None = None,
    cost: CostFunction | None = None,
    **parameters: Any,
) -> Allocation:
    """Distribute the compression over the matrices of `model` by a schedule of `SCHEDULES`, with mean `budget`.

    The budget is a sparsity (`0 ≤ S < 1`), or a number of bits per weight for schedules of bits. `parameters` are the
    fields of the schedule; a profile is used under its `pooling`. A measurement that the schedule does not need is
    ignored.

    Raises LyapunovPruneError for an unknown schedule or parameter, a missing measurement, and the errors of the
    schedule, in particular for a budget that it cannot meet.
    """
    made = SCHEDULES.make(schedule, **parameters)
    given = (
        None if made.needs is None else {"batch": batch, "profile": profile, "score": score, "cost": cost}[made.needs]
    )
    wrong = {
        f"needs {REMEDIES.get(made.needs or '', '')}": made.needs is not None and given is None,
        f"takes no sparsity of {budget:g}; give 0 or more and less than 1": (
            made.unit == "sparsity" and not 0 <= budget < 1
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"schedule {schedule} {why}")
    with held(model.model):  # a lock: another thread may have swapped weights in
        return made.allocate(model.model, budget, given)
