"""A bit width for every layer, one of a few: the least total cost whose mean width is within the budget."""

from __future__ import annotations

import ctypes
import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
TOLERANCE = 1e-9  # of the cost over the cheapest widths: how far the widths that are found may be from the best
_SCALE = 1e4  # of the largest cost: HiGHS ends within 1e-6 of the least sum, in whatever unit


class BitWidths(Schedule):
    """One of `widths` bits for each layer at least total cost, with a mean over all weights of at most the budget.

    `min Σ_l cost(l, b_l)` subject to `Σ_l size_l b_l ≤ budget · Σ_l size_l`: a knapsack over layers, solved by
    `scipy.optimize.milp` to 1e-9 of what it costs over the cheapest widths. The matrices of a layer share its width, so
    that engines can fuse them; 16 leaves the layer unchanged. Scales are not counted, because they take the same space
    at every width. The optimum may leave part of the budget unused.

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
    require_numbers(cost, f"costs of {len(widths)} widths in each layer", "give wider widths, or other text")
    require_reached(budget, widths)
    above = cost - cost.min(1, keepdims=True)  # what is paid over the cheapest widths
    share, rows = sizes / sizes.sum(), np.arange(len(cost))
    pick = _cheaper(above, share, widths, budget, np.zeros(len(cost), dtype=np.int64))
    # The solver's tolerances are absolute, so the unit is the cost that is already reached.
    while (total := above[rows, pick].sum()) > 0:
        found = _cheaper(above, share, widths, budget, pick)
        if above[rows, found].sum() >= total * (1 - TOLERANCE):
            break
        pick = found
    return widths[pick]


def _cheaper(cost: np.ndarray, share: np.ndarray, widths: np.ndarray, budget: float, pick: np.ndarray) -> np.ndarray:
    """The index of the width of every layer with the least sum of `cost`, without those that cost more than `pick`."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    (L, W), most = cost.shape, cost[np.arange(len(cost)), pick].sum()
    allowed = cost <= most
    with _nothing_printed():
        found = milp(
            np.where(allowed, cost, 0).ravel() * (_SCALE / most if most > 0 else 1),
            integrality=np.ones(L * W),
            bounds=Bounds(0, allowed.ravel()),
            constraints=[
                LinearConstraint(np.kron(np.eye(L), np.ones(W)), 1, 1),
                LinearConstraint((share[:, None] * widths).ravel(), -np.inf, budget * (1 + 1e-12)),
            ],
            options={"mip_rel_gap": 0},
        )
    if found.x is None:
        raise LyapunovPruneError(f"no widths were found for a mean of {budget:g} bits ({found.message}); give another")
    return found.x.reshape(L, W).argmax(1)


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Drop what C code prints on stdout within the block: HiGHS has lines that its options do not turn off."""
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else lambda _: None
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        flush(None)
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def require_reached(budget: float, widths: Sequence[int] | np.ndarray) -> None:
    """Raise LyapunovPruneError for a budget below the narrowest of `widths`."""
    if not budget >= widths[0]:
        raise LyapunovPruneError(
            f"no layer is narrower than {widths[0]} bits, so their mean is not {budget:g}; give {widths[0]} or more"
        )


def picked(cost: np.ndarray, widths: tuple[int, ...], width: np.ndarray) -> float:
    """The sum of `cost` (L × widths) at the `width` of every layer."""
    return float(cost[np.arange(len(cost)), np.searchsorted(widths, width)].sum())
