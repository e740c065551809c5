"""What rounding one layer alone does to the prediction, for schedules that share bits out by it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lyapunov_prune.allocation.bit_widths import DENSE
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.method import Method
from lyapunov_prune.compression.second_order import weights_for
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.replacement import replaced
from lyapunov_prune.forward.states import changed_finals
from lyapunov_prune.models.projections import Projection, by_layer, find_projections
from lyapunov_prune.predictions.tiles import measures
from lyapunov_prune.results.result import MeasuredOn


@dataclass(frozen=True, eq=False)
class RoundingCost:
    """The cost that bits are shared out by (`allocation.schedule.Cost`): the divergence of one rounded layer.

    Each forward begins at the layer that is rounded, with the dense state that enters it, so that a width of all L
    layers costs about L / 2 forwards of the layers, and L of the head. A method that goes by statistics takes those of
    the dense model; what it makes is then kept, a copy of the layers for every width.
    """

    reading: Reading
    method: Method
    batch_size: int

    @property
    def measured_on(self) -> MeasuredOn:
        return self.reading.measured_on()

    @torch.no_grad()
    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        """`KL(p‖q)` in nats a token, the mean over every position of a window but its last: (L × widths), float64.

        `p` is the dense prediction and `q` that with the matrices of layer l alone at b bits; 0 at 16. NaN where it is
        not finite. Raises NonFiniteError when the dense model is not finite.
        """
        model, layers = self.reading.model, self.reading.structure.num_layers
        matrices = by_layer(find_projections(self.reading.decoder))
        made = self._made(matrices, widths)

        def rounded(layer: int, width: int) -> AbstractContextManager[None]:
            if width == DENSE or layer not in matrices:
                return nullcontext()
            here = {p: p.weight(model) for p in matrices[layer]}
            if made:
                return replaced(model, {p: made[p.name, width] for p in here})
            return replaced(model, {p: self.method(W, width) for p, W in here.items()})

        asked = [(layer, width) for layer in range(layers) for width in widths]
        changes = [(layer, partial(rounded, layer, width)) for layer, width in asked]
        total, count = np.zeros(len(asked)), 0
        for dense, changed in changed_finals(self.reading, changes, self.batch_size, "rounding, a layer at a time"):
            total += measures(self.reading.scorer, dense, changed, 1.0)[:, 1].sum(-1).cpu().numpy()
            count += len(dense)
        return (total / count).reshape(layers, len(widths))

    def _made(
        self, matrices: dict[int, list[Projection]], widths: Sequence[int]
    ) -> dict[tuple[str, int], torch.Tensor]:
        """By name and width what a method that goes by statistics makes; empty for one that looks at weights alone."""
        made: dict[tuple[str, int], torch.Tensor] = {}
        if self.method.needs == "nothing":
            return made
        model = self.reading.model

        def keep(here: Sequence[Projection], statistics: dict[str, Statistics]) -> None:
            for p in here:
                for width in widths:
                    if width != DENSE:
                        made[p.name, width] = self.method(p.weight(model), width, statistics[p.name])

        everything = [p for here in matrices.values() for p in here]
        weights = weights_for(self.method, self.reading, everything, self.batch_size)
        stream(model, self.reading, everything, self.method.needs, keep, batch_size=self.batch_size, weights=weights)
        return made
