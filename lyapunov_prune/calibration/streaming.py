"""Calibration layer by layer: what enters every matrix once the layers before it are compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import Gathering, require_seen
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.progress import track

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
    their hidden state, the forward begins further back and is the same.

    `needs` is `norms`, `gram` (`Σ_t x_t x_tᵀ`, n × n, float64, one for matrices that share their input), or
    `sensitivity`: also `Σ_t g_t g_tᵀ`, `g_t` the gradient at the matrix's output of `⟨v, layer output⟩` with
    `v ~ N(0, I)`, for the layer as it was before `change` (`Statistics`). The seed is the layer's index, so that what
    a layer gathers does not depend on which others were asked for.
    Memory: the hidden states of the batch, twice at most, and the statistics of one layer.

    Raises LyapunovPruneError for experts that a family fuses, whose inputs cannot be seen, for a matrix that no
    token reached, and for activations that are not finite.
    """
    require_seen(projections)
    reading = read(model, batch)
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
        generator = torch.Generator().manual_seed(layer)
        gathering = Gathering(model, here, needs)
        with gathering.watching():
            for ids, hidden in zip(windows, states, strict=True):
                with torch.set_grad_enabled(needs == "sensitivity"):
                    output = prefix.advance(ids, at, hidden, layer + 1)
                if needs == "sensitivity":
                    gathering.differentiate(output, generator)
        change(here, gathering.statistics())
