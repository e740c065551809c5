"""The functions of the schedules, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.amplification import lyapunov, lyapunov_budget
from lyapunov_prune.allocation.schedules.alpha_pruning import alpha_pruning
from lyapunov_prune.allocation.schedules.atp import Score, atp, atp_search
from lyapunov_prune.allocation.schedules.bits import allocate_bits
from lyapunov_prune.allocation.schedules.guidelines import guidelines
from lyapunov_prune.allocation.schedules.owl import owl
from lyapunov_prune.allocation.schedules.uniform import uniform
from lyapunov_prune.allocation.table import SCHEDULES, require_parameters
from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.models.held import held
from lyapunov_prune.profiles.contraction_profile import ContractionProfile

# `function(model, budget, …)`, which also takes the measurement it needs and its keyword parameters.
_FUNCTIONS: dict[str, Callable[..., Allocation]] = {
    "alpha-pruning": alpha_pruning,
    "atp": atp,
    "atp-search": atp_search,
    "bits": allocate_bits,
    "guidelines": guidelines,
    "lyapunov": lyapunov,
    "lyapunov-budget": lyapunov_budget,
    "owl": owl,
    "uniform": uniform,
}
REMEDIES = {
    "batch": "a calibration batch; give batch",
    "profile": "a contraction profile; measure one and give it",
    "score": "a score of allocations, which compress makes of its calibration text; give that a batch",
}


@checked
def allocate(
    model: PreTrainedModel,
    schedule: str,
    budget: float,
    *,
    batch: Readable | None = None,
    profile: ContractionProfile | None = None,
    score: Score | None = None,
    **parameters: Any,
) -> Allocation:
    """Distribute the compression over the matrices of `model` by a schedule of `SCHEDULES`, with mean `budget`.

    The budget is a sparsity (`0 ≤ S < 1`), or for `bits` a number of bits per weight. `parameters` are those of the
    schedule's function; a profile is used under its `pooling`. A measurement that the schedule does not need is
    ignored.

    Raises LyapunovPruneError for an unknown schedule or parameter, a missing measurement, and the errors of the
    schedule, in particular for a budget that it cannot meet.
    """
    require_parameters(schedule, parameters)
    known, function = SCHEDULES[schedule], _FUNCTIONS[schedule]
    with held(model):  # another thread may have changed its weights
        if known.needs is None:
            return function(model, budget, **parameters)
        given = {"batch": batch, "profile": profile, "score": score}[known.needs]
        if given is None:
            raise LyapunovPruneError(f"schedule {schedule} needs {REMEDIES[known.needs]}")
        return function(model, budget, given, **parameters)
