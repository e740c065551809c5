"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.alpha_pruning import alpha_pruning
from lyapunov_prune.allocation.atp import atp
from lyapunov_prune.allocation.bits import allocate_bits
from lyapunov_prune.allocation.guidelines import guidelines
from lyapunov_prune.allocation.lyapunov import lyapunov, lyapunov_budget
from lyapunov_prune.allocation.owl import owl
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.allocation.uniform import uniform
from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable
from lyapunov_prune.models.held import held
from lyapunov_prune.profiles.contraction import ContractionProfile

# `function(model, budget, …)` with the measurement that it needs and its keyword parameters.
_FUNCTIONS: dict[str, Callable[..., Allocation]] = {
    "alpha-pruning": alpha_pruning,
    "atp": atp,
    "bits": allocate_bits,
    "guidelines": guidelines,
    "lyapunov": lyapunov,
    "lyapunov-budget": lyapunov_budget,
    "owl": owl,
    "uniform": uniform,
}
REMEDIES = {"batch": "a calibration batch; give batch", "profile": "a contraction profile; measure one and give it"}


@checked
def allocate(
    model: PreTrainedModel,
    schedule: str,
    budget: float,
    *,
    batch: Readable | None = None,
    profile: ContractionProfile | None = None,
    **parameters: float,
) -> Allocation:
    """How much of every matrix of `model` is compressed by a schedule of `SCHEDULES`, in the mean `budget`.

    The budget is a sparsity (`0 ≤ S < 1`), or for `bits` a number of bits a weight. `parameters` are those of the
    schedule's own function. A measurement that the schedule does not need is not used.

    Raises LyapunovPruneError for an unknown schedule or parameter, a measurement that is missing, and as the
    schedule does, in particular for a budget that it cannot meet.
    """
    if schedule not in SCHEDULES:
        raise LyapunovPruneError(f"unknown schedule {schedule!r}; give one of {', '.join(SCHEDULES)}")
    known, function = SCHEDULES[schedule], _FUNCTIONS[schedule]
    unknown = next((name for name in parameters if name not in known.parameters), None)
    if unknown:
        has = f"it has {', '.join(known.parameters)}" if known.parameters else "it has none"
        raise LyapunovPruneError(f"schedule {schedule} has no parameter {unknown!r}; {has}")
    with held(model):  # another thread may have other weights in it
        if known.needs is None:
            return function(model, budget, **parameters)
        given = batch if known.needs == "batch" else profile
        if given is None:
            raise LyapunovPruneError(f"schedule {schedule} needs {REMEDIES[known.needs]}")
        return function(model, budget, given, **parameters)
