"""ATP at the slope of least loss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.schedule import Schedule
from lyapunov_prune.allocation.schedules.atp import ATP, steepest
from lyapunov_prune.arguments import Count
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Allocation


class ATPSearch(Schedule):
    """`ATP` at the β of least `score` among `β_k = k/T · min(2S, 2(1 − S)) / (L − 1)`, `k = 1 … T`, T the `trials`.

    The search of Huang et al. (see `atp`), reimplemented from its description: a grid on `0 < β ≤ largest`, scored by
    perplexity. The smaller β wins a tie. Costs one compression and one scoring per trial. `tried` of the result holds
    every β with its score.

    Raises LyapunovPruneError unless `trials` is a positive integer, when no trial has a finite loss, and like `atp`.
    """

    trials: Count = 9

    help = "atp with the slope of least loss on held-out calibration windows"
    reference = "Huang et al., ICML 2025, arXiv:2502.14770"
    needs = "score"

    def allocate(self, model: PreTrainedModel, budget: float, given: Any = None) -> Allocation:
        from lyapunov_prune.allocation.allocation import Matrices
        from lyapunov_prune.progress import track

        matrices = Matrices.of(model)
        largest = steepest(budget, matrices.model.num_layers)
        grid = np.unique(np.linspace(0, largest, self.trials + 1)[1:])  # a single β if the largest is 0
        trials = [ATP(float(beta)).amounts(model, matrices, budget, None) for beta in grid]
        candidates = [matrices.allocated(ATP.name, budget, *trial) for trial in trials]
        losses = np.array([given(allocation) for allocation in track(candidates, "search of beta")])
        if not np.isfinite(losses).any():
            raise LyapunovPruneError(
                f"no trial of the search at sparsity {budget:g} left a finite loss; give a lower one"
            )
        best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
        return replace(
            candidates[best],
            schedule=self.name,
            parameters={"trials": float(self.trials), **candidates[best].parameters},
            measured_on=(given.measured_on,),
            tried=tuple(zip(grid.tolist(), losses.tolist(), strict=True)),
        )
