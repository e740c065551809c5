"""Calibration layer by layer: every matrix sees the inputs that result from the compressed layers before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import Gathering, require_seen
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.streamed import Run, stream_of
from lyapunov_prune.progress import status, track

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
    layers in all. The arguments of a layer (masks, positions) come from the model's own forward (`Prefix`); nothing is
    captured and replayed. Where a layer uses more of earlier layers than their hidden state, the forward begins further
    back. For a model whose layers are read from files (`models.streamed`) both runs happen in one forward while the
    layer is loaded, and the change is kept with it.

    `needs` is `norms`, `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, shared by matrices with the same input), or
    `sensitivity`: also `Σ_t g_t g_tᵀ`, with `g_t` the gradient at the matrix's output of `⟨v, layer output⟩`, `v ~ N(0,
    I)`, for the layer before `change` (`Statistics`). The seed is the layer's index, so the statistics of a layer do
    not depend on which other layers are requested.

    Memory: the hidden states of the batch, at most twice, and the statistics of one layer.

    Raises LyapunovPruneError for fused experts, whose inputs cannot be recorded, for a matrix that no token reached,
    and for activations that are not finite.
    """
    require_seen(projections)
    reading = read(model, batch, streamed=True)
    if stream_of(model) is not None:
        _in_one_forward(reading, batch_size, projections, needs, change)
        return
    windows, prefix = reading.windows(batch_size), reading.prefix
    states, at = [torch.empty(0)] * len(windows), 0
    for layer in track(range(reading.structure.num_layers), "calibration"):
        here = [p for p in projections if p.layer == layer]
        if not here:
            continue
        if prefix.entry(layer) > at:
            entry = prefix.entry(layer)
            with torch.no_grad():
                states = [prefix.advance(ids, at, h, entry) for ids, h in zip(windows, states, strict=True)]
            at = entry
        pairs = zip(windows, states, strict=True)
        outputs = (prefix.advance(ids, at, hidden, layer + 1) for ids, hidden in pairs)
        change(here, _gathered(model, here, needs, outputs))


@torch.no_grad()
def _in_one_forward(
    reading: Reading, batch_size: int, projections: Sequence[Projection], needs: str, change: Change
) -> None:
    (ids,) = reading.windows(batch_size)

    def visit(layer: int, hidden: torch.Tensor, run: Run) -> None:
        here = [p for p in projections if p.layer == layer]
        if here:  # a layer may add to its input in place, and needs it again
            change(here, _gathered(reading.model, here, needs, run(hidden.clone())))

    layers = stream_of(reading.model)
    assert layers is not None
    with layers.visiting(visit), status("calibration, one layer at a time"):
        run_backbone(reading.structure, ids)


def _gathered(
    model: PreTrainedModel, here: Sequence[Projection], needs: str, outputs: Iterable[torch.Tensor]
) -> dict[str, Statistics]:
    """The statistics of the matrices of a layer, which runs while its `outputs` are consumed."""
    generator = torch.Generator().manual_seed(here[0].layer)
    gathering = Gathering(model, here, needs)
    with gathering.watching(), torch.set_grad_enabled(needs == "sensitivity"):
        for output in outputs:
            if needs == "sensitivity":
                gathering.differentiate(output, generator)
    return gathering.statistics()
