"""A bit width for every layer, one of a few: the least total cost whose mean width is within the budget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.schedule import Schedule
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np
from lyapunov_prune.linalg import require_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Allocation, Matrices
    from lyapunov_prune.allocation.schedule import Amounts

DENSE = 16  # the width that stands for a layer left as it is


class BitWidths(Schedule):
    """One of `widths` bits for each layer at least total cost, with a mean over all weights of at most the budget.

    `min Σ_l cost(l, b_l)` subject to `Σ_l size_l b_l ≤ budget · Σ_l size_l`: a knapsack over layers, solved exactly by
    `scipy.optimize.milp`. The matrices of a layer share its width, so that engines can fuse them; 16 leaves the layer
    unchanged. Scales are not counted, because they take the same space at every width. The optimum may leave part of
    the budget unused.

    Raises LyapunovPruneError for a budget below the narrowest width, and for widths that are not ascending integers
    from 2 to 8, or 16.
    """

    widths: tuple[int, ...] = (2, 3, 4, 8, DENSE)

    unit = "bits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.widths) != sorted({*self.widths} & {*range(2, 9), DENSE}) or len(self.widths) < 2:
            raise LyapunovPruneError(f"widths {self.widths}; give two or more of 2 to 8, or 16, in rising order")

    @abstractmethod
    def cost(self, matrices: Matrices, given: Any) -> np.ndarray:
        """The cost of each width in each layer, (layers × widths); `given` is the measurement named by `needs`."""

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        cost = self.cost(matrices, given)
        sizes = np.bincount(matrices.layers, matrices.sizes, len(cost))
        width = least_cost(cost, np.array(self.widths), sizes, budget)
        parameters: dict[str, float | str] = {
            "widths": " ".join(map(str, self.widths)),
            "cost": picked(cost, self.widths, width),
        }
        return width[matrices.layers].astype(np.float64), parameters


def evenly(matrices: Matrices, budget: float, widths: Sequence[int]) -> Allocation:
    """Uniform bits: the widest of `widths` that all layers can have, and the next wider one for as many layers as fit.

    The wider layers are spread evenly over the depth. Raises LyapunovPruneError for a budget below the narrowest width.
    """
    require_reached(budget, widths)
    narrow = max(b for b in widths if b <= budget)
    wider, layers = [b for b in widths if b > budget], matrices.model.num_layers
    amount = np.full(len(matrices.layers), float(narrow))
    for count in range(layers, 0, -1) if wider else ():
        wide = [int((k + 0.5) * layers / count) for k in range(count)]
        tried = np.where(np.isin(matrices.layers, wide), float(wider[0]), amount)
        if np.average(tried, weights=matrices.sizes) <= budget:
            amount = tried
            break
    return matrices.allocated("uniform", budget, amount, {}, unit="bits")


def least_cost(cost: np.ndarray, widths: np.ndarray, sizes: np.ndarray, budget: float) -> np.ndarray:
    """The width of every layer, (L,) int, with the least sum of `cost` (L × widths) and a mean of at most `budget`.

    `sizes` (L,) are the numbers of weights of the layers; a layer without weights gets the narrowest width. Raises
    LyapunovPruneError for costs that are not finite and for a budget that no widths meet.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    require_numbers(cost, f"costs of {len(widths)} widths in each layer", "give wider widths, or other text")
    require_reached(budget, widths)
    (L, W), share = cost.shape, sizes / sizes.sum()
    largest = np.abs(cost).max()
    found = milp(
        cost.ravel() / (largest if largest > 0 else 1),
        integrality=np.ones(L * W),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(np.kron(np.eye(L), np.ones(W)), 1, 1),
            LinearConstraint((share[:, None] * widths).ravel(), -np.inf, budget * (1 + 1e-12)),
        ],
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        raise LyapunovPruneError(f"no widths were found for a mean of {budget:g} bits ({found.message}); give another")
    return widths[found.x.reshape(L, W).argmax(1)]


def require_reached(budget: float, widths: Sequence[int] | np.ndarray) -> None:
    """Raise LyapunovPruneError for a budget below the narrowest of `widths`."""
    if not budget >= widths[0]:
        raise LyapunovPruneError(
            f"no layer is narrower than {widths[0]} bits, so their mean is not {budget:g}; give {widths[0]} or more"
        )


def picked(cost: np.ndarray, widths: tuple[int, ...], width: np.ndarray) -> float:
    """The sum of `cost` (L × widths) at the `width` of every layer."""
    return float(cost[np.arange(len(cost)), np.searchsorted(widths, width)].sum())


def noise(widths: tuple[int, ...]) -> np.ndarray:
    """The energy of the rounding error at each width b, up to a constant: `4^−b`, and 0 at 16 bits."""
    return np.array([0.0 if b == DENSE else 4.0**-b for b in widths])


def weighted_noise(logs: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """The weighted energy `w_l² 4^−b` of each layer's rounding error, up to a factor, (L × widths); `logs = ln w_l`."""
    return np.exp(2 * (logs - logs.max()))[:, None] * noise(widths)
