"""Calibration layer by layer: what enters every matrix once the layers before it are compressed."""

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

# Called with a layer's matrices and what entered each; changes the layer's weights before it returns.
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
    """Go through the layers in order: gather what enters each, let `change` compress it, hand on its new output.

    Every layer runs twice, once for its statistics and once, compressed, for the input of the next: two
    forwards of the layers in all. The arguments of a layer (masks, positions) are those that the model's own
    forward hands it (`Prefix`); nothing is captured and replayed. Where a layer uses more of the earlier ones than
    their hidden state, the forward begins further back and is the same. Of a model whose layers are read from files
    (`models.streamed`) both runs are made while a layer is held, in one forward, and what was changed goes with it.

    `needs` is `norms`, `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, one for matrices that share their input), or
    `sensitivity`: also `Σ_t g_t g_tᵀ`, `g_t` the gradient at the matrix's output of `⟨v, layer output⟩` with
    `v ~ N(0, I)`, for the layer as it was before `change` (`Statistics`). The seed is the layer's index, so that what
    a layer gathers does not depend on which others were asked for.
    Memory: the hidden states of the batch, twice at most, and the statistics of one layer.

    Raises LyapunovPruneError for experts that a family fuses, whose inputs cannot be seen, for a matrix that no
    token reached, and for activations that are not finite.
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
        if here:  # a layer may add to what it is given, and is given it again
            change(here, _gathered(reading.model, here, needs, run(hidden.clone())))

    layers = stream_of(reading.model)
    assert layers is not None
    with layers.visiting(visit), status("calibration, one layer at a time"):
        run_backbone(reading.structure, ids)


def _gathered(
    model: PreTrainedModel, here: Sequence[Projection], needs: str, outputs: Iterable[torch.Tensor]
) -> dict[str, Statistics]:
    """The statistics of the matrices of a layer, which runs as its `outputs` are drawn."""
    generator = torch.Generator().manual_seed(here[0].layer)
    gathering = Gathering(model, here, needs)
    with gathering.watching(), torch.set_grad_enabled(needs == "sensitivity"):
        for output in outputs:
            if needs == "sensitivity":
                gathering.differentiate(output, generator)
    return gathering.statistics()
