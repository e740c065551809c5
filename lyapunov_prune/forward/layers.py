"""The layers of a model in order, each run on its input at that time, wherever its weights are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.streamed import Run
from lyapunov_prune.models.streamed import Visit as VisitHeld
from lyapunov_prune.progress import status, track

# Called with a layer and its outputs, a piece of the batch at a time; the layer runs as they are consumed.
Visit = Callable[[int, Iterator[torch.Tensor]], None]


def each_layer(reading: Reading, layers: Collection[int], visit: Visit, batch_size: int, description: str) -> None:
    """Call `visit` for each of `layers` in order, with its weights in memory; the next layer gets its changed output.

    The arguments of a layer (masks, positions) come from the model's own forward (`Prefix`). If a layer uses more of
    earlier layers than their hidden state, the forward begins further back. Streamed layers (`models.streamed`) are all
    visited in one forward, each while it is held.

    Memory: at most twice the hidden states of the batch.
    """
    if reading.decoder.stream is not None:

        def visited(layer: int, hidden: torch.Tensor, run: Run) -> None:
            if layer in layers:  # cloned, since a layer may change its input in place
                visit(layer, run(hidden.clone()))

        (ids,) = reading.windows(batch_size)
        with torch.no_grad():
            in_one_forward(reading.decoder, ids, visited, f"{description}, one layer at a time")
        return
    for _, (layer, outputs) in zip(track(layers, description), in_order(reading, layers, batch_size), strict=True):
        visit(layer, outputs)


def in_order(
    reading: Reading, layers: Collection[int], batch_size: int
) -> Iterator[tuple[int, Iterator[torch.Tensor]]]:
    """Yield each of `layers` of a model in memory with its outputs; consume them before asking for the next layer.

    Two models are compared by advancing two of these in turn. Otherwise as `each_layer`.
    """
    windows = reading.windows(batch_size)
    prefix, states, at = reading.prefix, [torch.empty(0)] * len(windows), 0
    for layer in sorted(layers):
        entry = prefix.entry(layer)
        if entry > at:
            with torch.no_grad():
                states = [prefix.advance(ids, at, h, entry) for ids, h in zip(windows, states, strict=True)]
            at = entry
        pairs = zip(windows, states, strict=True)
        yield layer, (prefix.advance(ids, at, hidden, layer + 1) for ids, hidden in pairs)


def in_one_forward(decoder: Decoder, ids: torch.Tensor, visit: VisitHeld, description: str) -> torch.Tensor:
    """The final state of `ids` by the streamed `decoder`; each layer is visited before it runs."""
    assert decoder.stream is not None
    with decoder.stream.visiting(visit), status(description):
        return final_state(decoder.structure, ids)
