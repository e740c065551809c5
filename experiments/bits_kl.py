"""Bits by layer, by the measured divergence of each layer rounded alone: a knapsack over layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import DENSE, Allocation, Matrices
from lyapunov_prune.allocation.knapsack import cheapest
from lyapunov_prune.calibration.downstream import token_weights
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.method import Method
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection, by_layer
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.results.result import MeasuredOn

WIDTHS = (2, 3, 4, 8, DENSE)


class Cost(Protocol):
    """The cost of a bit width in one layer, and the text it is measured on."""

    @property
    def measured_on(self) -> MeasuredOn: ...

    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        """The cost of every layer at each of `widths` bits, (L × widths) float64; smaller is better."""

    def together(self, allocations: Sequence[Allocation]) -> list[float]:
        """The cost of each of `allocations` as a whole, on text that was not used for the cost of single layers."""


def bits_kl(model: PreTrainedModel, budget: float, cost: Cost) -> Allocation:
    """One of `WIDTHS` bits for each layer at least total cost, with a mean over all weights of at most `budget`.

    `min Σ_l cost(l, b_l)` subject to `Σ_l size_l b_l ≤ budget · Σ_l size_l` (Dong et al., NeurIPS 2020,
    arXiv:1911.03852, with KL in place of curvature). The matrices of a layer share its width; 16 leaves it unchanged.
    Scales are not counted. If uniform bits of the same budget diverge less on windows that gave no cost, they are taken
    instead. Raises LyapunovPruneError for a budget below the narrowest width.
    """
    matrices, by_width = Matrices.of(model), cost(WIDTHS)
    sizes = np.bincount(matrices.layers, matrices.sizes, len(by_width))
    width = least_cost(by_width, np.array(WIDTHS), sizes, budget)
    amount = width[matrices.layers].astype(np.float64)
    known: dict[str, float | str] = {"widths": " ".join(map(str, WIDTHS)), "cost": picked(by_width, WIDTHS, width)}
    even = evenly(matrices, budget, WIDTHS)
    own, uniform = cost.together((matrices.allocated("bits-kl", budget, amount, known, unit="bits"), even))
    told = {**known, "KL, used to choose": own, "KL of uniform bits, used to choose": uniform}
    chosen = amount if own < uniform else even.amount
    return matrices.allocated("bits-kl", budget, chosen, told, (cost.measured_on,), "bits")


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


def halves(batch: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """The first half of the windows, to compress by, and the second half, to judge by.

    Raises LyapunovPruneError for a single window.
    """
    if len(batch.ids) < 2:
        raise LyapunovPruneError("a search scores on windows that it does not calibrate by; give two or more")
    middle = (len(batch.ids) + 1) // 2
    return replace(batch, ids=batch.ids[:middle]), replace(batch, ids=batch.ids[middle:])


@dataclass(frozen=True, eq=False)
class RoundingCost:
    """The cost by which bits are distributed: what rounding one layer diverges by.

    Each forward begins at the rounded layer with its dense input, so that one width of all L layers costs about L / 2
    forwards of the layers, and L of the head. A method that needs statistics takes those of the dense model; the
    matrices that it makes are kept, a copy of the layers for every width. Costs are measured on the first half of the
    windows of `reading`, and `together` on the second. Raises LyapunovPruneError for a single window.
    """

    reading: Reading
    method: Method
    batch_size: int

    def __post_init__(self) -> None:
        halves(self.reading.batch)

    @property
    def measured_on(self) -> MeasuredOn:
        return self.reading.measured_on()

    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        """Mean `KL(p‖q)` in nats per token over every position of a window except the last, (L × widths) float64.

        `p` is the dense prediction and `q` the prediction with the matrices of layer l alone at b bits; 0 at 16 bits,
        NaN if it is not finite. Raises NonFiniteError when the dense model is not finite.
        """
        layers = range(self.reading.structure.num_layers)
        matrices = by_layer(find_projections(self.reading.decoder))
        asked = [(layer, dict.fromkeys(matrices.get(layer, []), width)) for layer in layers for width in widths]
        return self._divergences(asked, self._halves[0]).reshape(len(layers), len(widths))

    def together(self, allocations: Sequence[Allocation]) -> list[float]:
        """`KL(p‖q)` with every matrix rounded as in each of `allocations`, on the second half of the windows.

        Each allocation costs one forward. Where they are large, the divergences of single layers do not add up to it.
        """
        matrices = find_projections(self.reading.decoder)
        asked = [(0, {p: int(allocation.of(p.name)) for p in matrices}) for allocation in allocations]
        return self._divergences(asked, self._halves[1]).tolist()

    @cached_property
    def _halves(self) -> list[Reading]:
        return [read(self.reading.decoder, half) for half in halves(self.reading.batch)]

    @torch.no_grad()
    def _divergences(self, asked: Sequence[tuple[int, dict[Projection, int]]], on: Reading) -> np.ndarray:
        """The divergence of each of `asked`: the first layer that changes, and the bits of matrices (16: dense)."""
        every = [(first, {p: b for p, b in widths.items() if b != DENSE}) for first, widths in asked]
        wanted = {number: (first, widths) for number, (first, widths) in enumerate(every) if widths}
        made = self._made({(p, b) for _, widths in wanted.values() for p, b in widths.items()})

        def rounded(widths: dict[Projection, int]) -> AbstractContextManager[None]:
            model = self.reading.model
            return replaced(
                model, {p: made[p, b] if made else self.method(p.weight(model), b) for p, b in widths.items()}
            )

        changes = [(first, partial(rounded, widths)) for first, widths in wanted.values()]
        found = np.zeros(len(every))
        if changes:
            found[list(wanted)] = divergences_of(on, changes, 1.0, self.batch_size, "rounding")[:, 1]
        return found

    def _made(self, wanted: set[tuple[Projection, int]]) -> dict[tuple[Projection, int], torch.Tensor]:
        """The rounded matrices of a method that needs statistics; empty for one that uses the weights alone."""
        made: dict[tuple[Projection, int], torch.Tensor] = {}
        if self.method.needs == "nothing":
            return made
        model, on = self.reading.model, self._halves[0]

        def keep(here: Sequence[Projection], statistics: dict[str, Statistics]) -> None:
            for p, width in wanted:
                if p in here:
                    made[p, width] = self.method(p.weight(model), width, statistics[p.name])

        everything = find_projections(self.reading.decoder)
        weighted = getattr(self.method, "weighted", False)
        weights = token_weights(on, everything, self.batch_size) if weighted else None
        stream(model, on, everything, self.method.needs, keep, batch_size=self.batch_size, weights=weights)
        return made
