"""The schedule by which every layer adds the same error at the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


class LyapunovBudget(Schedule):
    """`s_l ∝ √τ_l`, with `τ` the `tolerance` by `reading`, because error energy grows as the square of the sparsity.

    With the reading `equal-error` every layer adds the same error at the output, except those at the ceiling of 0.99.
    Structural sensitivity, §6.4. Raises LyapunovPruneError for a budget outside `0 … 0.99`, another reading, a profile
    of another model, and a ρ that is not finite or not positive.
    """

    reading: Literal["equal-error", "downstream"] = "equal-error"

    help = "every layer adds the same error at the output"
    reference = "structural sensitivity, §6.4"
    needs = "profile"

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        from lyapunov_prune.allocation.amplification import exponentials, log_tolerance
        from lyapunov_prune.allocation.fitting import fit

        target = exponentials(log_tolerance(given, self.reading)[matrices.layers] / 2)
        return fit(target, matrices.sizes, budget, high=SPARSEST), {"reading": self.reading}
