"""What rounding costs the prediction on calibration windows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.bit_widths import DENSE
from lyapunov_prune.calibration.downstream import token_weights
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.method import Method
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection, by_layer
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.results.result import MeasuredOn


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
    """The cost by which bits are distributed (`allocation.schedule.CostFunction`): what rounding one layer diverges by.

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
