"""Calibration layer by layer: every matrix sees the inputs that result from the compressed layers before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import Gathering, require_seen
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.forward.layers import each_layer
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.projections import Projection, by_layer

# Called with a layer's matrices and their statistics; changes the layer's weights in place.
Change = Callable[[Sequence[Projection], dict[str, Statistics]], None]


def stream(
    model: PreTrainedModel,
    batch: Readable,
    projections: Sequence[Projection],
    needs: str,
    change: Change,
    *,
    batch_size: int = 1,
) -> None:
    """For each layer in order: gather the statistics of its matrices, call `change`, and pass on its new output.

    Every layer runs twice, once for its statistics and once, compressed, for the input of the next: two forwards of the
    layers in all (`each_layer`); of a streamed model both happen in one forward, while the layer is held, and the
    change is kept with it.

    `needs` is `norms`, `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, shared by matrices with the same input), or
    `sensitivity`: also `Σ_t g_t g_tᵀ`, with `g_t` the gradient at the matrix's output of `⟨v, layer output⟩`, `v ~ N(0,
    I)`, for the layer before `change` (`Statistics`). The seed is the layer's index, so the statistics of a layer do
    not depend on which other layers are requested.

    Memory: that of `each_layer`, and the statistics of one layer.

    Raises LyapunovPruneError for fused experts, whose inputs cannot be recorded, for a matrix that no token reached,
    and for activations that are not finite.
    """
    require_seen(projections)
    reading = read(wrap(model), batch)
    matrices = by_layer(projections)

    def visit(layer: int, outputs: Iterator[torch.Tensor]) -> None:
        change(matrices[layer], _gathered(reading.model, matrices[layer], needs, outputs))

    each_layer(reading, matrices, visit, batch_size, "calibration")


def _gathered(
    model: PreTrainedModel, here: Sequence[Projection], needs: str, outputs: Iterator[torch.Tensor]
) -> dict[str, Statistics]:
    """The statistics of the matrices of a layer, which runs while its `outputs` are consumed."""
    generator = torch.Generator().manual_seed(here[0].layer)
    gathering = Gathering(model, here, needs)
    with gathering.watching(), torch.set_grad_enabled(needs == "sensitivity"):
        for output in outputs:
            if needs == "sensitivity":
                gathering.differentiate(output, generator)
    return gathering.statistics()
