"""A bit width for every layer, one of a few: the least total cost whose mean width is within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lyapunov_prune.allocation.knapsack import cheapest
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np
from lyapunov_prune.linalg import require_numbers

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Allocation, Matrices

DENSE = 16  # the width that stands for a layer left as it is


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
    require_numbers(cost, f"costs of {len(widths)} widths in each layer", "give wider widths, or other text")
    require_reached(budget, widths)
    return widths[cheapest(cost, sizes[:, None] * widths, budget * float(sizes.sum()))]


def require_reached(budget: float, widths: Sequence[int] | np.ndarray) -> None:
    """Raise LyapunovPruneError for a budget below the narrowest of `widths`."""
    if not budget >= widths[0]:
        raise LyapunovPruneError(
            f"no layer is narrower than {widths[0]} bits, so their mean is not {budget:g}; give {widths[0]} or more"
        )


def picked(cost: np.ndarray, widths: tuple[int, ...], width: np.ndarray) -> float:
    """The sum of `cost` (L × widths) at the `width` of every layer."""
    return float(cost[np.arange(len(cost)), np.searchsorted(widths, width)].sum())
