"""Bits by the measured divergence of the prediction, for every layer at every width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.allocation.bit_widths import DENSE, evenly, least_cost, picked
from lyapunov_prune.allocation.schedule import Schedule
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts, CostFunction


class BitsKL(Schedule):
    """One of `widths` bits for each layer at least total cost, with a mean over all weights of at most the budget.

    `min Σ_l cost(l, b_l)` subject to `Σ_l size_l b_l ≤ budget · Σ_l size_l`: a knapsack over layers, solved by
    `scipy.optimize.milp` to 1e-9 of what it costs over the cheapest widths. The matrices of a layer share its width, so
    that engines can fuse them; 16 leaves the layer unchanged. Scales are not counted, because they take the same space
    at every width. The optimum may leave part of the budget unused.

    The cost of b bits in layer l is `KL(p‖q)` with that layer alone rounded, measured on the calibration text. To first
    order, the sum over layers is the divergence with all of them rounded together. Because that may not hold, the
    result is checked: if uniform bits of the same budget diverge less on windows that gave no cost, they are taken
    instead. These windows are then used to choose between the two, and the lower divergence is a little too low.

    Raises LyapunovPruneError for a budget below the narrowest width, and for widths that are not ascending integers
    from 2 to 8, or 16.
    """

    widths: tuple[int, ...] = (2, 3, 4, 8, DENSE)

    help = "bits of each layer by the measured KL of rounding it alone"
    reference = "Dong et al., NeurIPS 2020, arXiv:1911.03852, with KL in place of curvature"
    needs_cost = True
    unit = "bits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.widths) != sorted({*self.widths} & {*range(2, 9), DENSE}) or len(self.widths) < 2:
            raise LyapunovPruneError(f"widths {self.widths}; give two or more of 2 to 8, or 16, in rising order")

    def amounts(self, matrices: Matrices, budget: float, cost: CostFunction | None) -> Amounts:
        assert cost is not None  # `needs_cost`
        by_width = cost(self.widths)
        sizes = np.bincount(matrices.layers, matrices.sizes, len(by_width))
        width = least_cost(by_width, np.array(self.widths), sizes, budget)
        amount = width[matrices.layers].astype(np.float64)
        parameters: dict[str, float | str] = {
            "widths": " ".join(map(str, self.widths)),
            "cost": picked(by_width, self.widths, width),
        }
        even = evenly(matrices, budget, self.widths)
        own, uniform = cost.together((matrices.allocated(self.name, budget, amount, parameters, unit=self.unit), even))
        told = {**parameters, "KL, used to choose": own, "KL of uniform bits, used to choose": uniform}
        return amount if own < uniform else even.amount, told
