"""The schedule of least error at the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule
from lyapunov_prune.arguments import Range, Share
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


class Lyapunov(Schedule):
    """The schedule of least error at the output under a quadratic model of the error.

    Minimises `Σ_l w_l A_l s_l²`, where `w_l` is the sum of `‖W‖_F²` over the matrices of layer l and `A_l = Π_{k > l}
    ρ_k`, subject to `Σ_l n_l s_l = S Σ_l n_l` and `least · S ≤ s_l ≤ min(most · S, 0.99)`, with `n_l` the number of
    entries of layer l and `S` the budget. The minimum is `s_l = clip(c n_l / (w_l A_l))`, with `c` from the budget.
    Structural sensitivity, §6.4 and Appendix E, where all layers have the same size and `n_l` cancels. The true error
    grows more slowly than s², so the formula without bounds is too steep (same place), and the paper clamps it. Its
    bounds are not given; these defaults are ours.

    Raises LyapunovPruneError for bounds that exclude 1, a budget that the bounds exclude, a profile of another model, a
    ρ that is not finite or not positive, and a layer of zeros.
    """

    least: Share = 0.8
    most: Annotated[float, Range(1)] = 1.2

    help = "least error at the output in a quadratic model"
    reference = "structural sensitivity, §6.4 and Appendix E"
    needs = "profile"

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        from lyapunov_prune.allocation.amplification import exponentials, log_amplification, weight_energy
        from lyapunov_prune.allocation.fitting import fit

        w = matrices.layer_sum(weight_energy(model, matrices))
        if not (np.isfinite(w) & (w > 0)).all():
            layer = int(matrices.layers[np.argmin(np.isfinite(w) & (w > 0))])
            raise LyapunovPruneError(f"the weights of layer {layer} are all zero or not finite; use another schedule")
        logs = np.log(matrices.layer_sum(matrices.sizes)) - np.log(w) - log_amplification(given)[matrices.layers]
        high = min(self.most * budget, SPARSEST)
        amount = fit(exponentials(logs), matrices.sizes, budget, low=min(self.least * budget, high), high=high)
        return amount, {"least": self.least, "most": self.most}
