"""Each layer run on its input at that time, wherever its weights are; states of a text at many boundaries.

They are in memory or on disk. Also final states of a changed model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from lyapunov_prune.errors import reported
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.streamed import Run
from lyapunov_prune.models.streamed import Visit as VisitHeld
from lyapunov_prune.progress import status, track
from lyapunov_prune.results.files import require_disk

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


# The first layer that changes, and a context manager that applies the change.
Change = tuple[int, Callable[[], AbstractContextManager[None]]]


def room_for(number: int, like: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """An uninitialised tensor of `number` states like `like`, on its device or mapped to a file if memory is short.

    It is mapped unless twice its size is free, since layers and their computation need memory too. The file is in
    `folder` (None: the temporary one), has no name, and is freed with the tensor.

    Raises LyapunovPruneError, with the bytes that are needed, if the disk is full too.
    """
    needed, shape = number * like.nbytes, (number, *like.shape)
    if 2 * needed <= free_memory(str(like.device)):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    require_disk(folder, needed, "the states of all layers, for which memory is short,")
    with reported(f"the states of all layers need {needed:,} bytes in {folder}", "free some, lower --tokens"):
        folder.mkdir(parents=True, exist_ok=True)
        return _numbers_on_disk(needed // like.itemsize, like.dtype, folder).view(shape)


def _numbers_on_disk(count: int, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """An uninitialised tensor of `count` numbers in an unnamed file in `folder`.

    The file is freed with the tensor. Raises OSError if the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-mapped-", dir=folder) as place:
        file = Path(place) / "numbers"
        with file.open("wb") as opened:
            if hasattr(os, "posix_fallocate"):  # a full disk raises here, instead of a signal on a later write
                os.posix_fallocate(opened.fileno(), 0, max(count * dtype.itemsize, 1))
        return torch.from_file(str(file), shared=True, size=count, dtype=dtype)


class KeptStates(dict[int, torch.Tensor]):
    """Up to `number` states (windows × tokens × width) by key, each added whole or in pieces of the windows.

    With `on_disk`, for the whole text of a streamed model, all states share one tensor made by `room_for` in `folder`.
    """

    def __init__(self, number: int, windows: int, *, on_disk: bool = False, folder: Path | None = None) -> None:
        super().__init__()
        self._number, self._windows, self._on_disk, self._folder = number, windows, on_disk, folder
        self._room: list[torch.Tensor] = []
        self._filled: dict[int, int] = {}

    def add(self, key: int, piece: torch.Tensor) -> None:
        if key not in self:
            shape = (self._windows, *piece.shape[1:])
            if self._on_disk and not self._room:
                self._room += room_for(self._number, piece[:1].expand(shape), self._folder).unbind()
            self[key] = self._room.pop() if self._on_disk else piece.new_empty(shape)
        start = self._filled.get(key, 0)
        self[key][start : start + len(piece)] = piece
        self._filled[key] = start + len(piece)


def finals_without_each(
    reading: Reading, ids: torch.Tensor, folder: Path | None, description: str
) -> Iterator[tuple[torch.Tensor, Sequence[torch.Tensor]]]:
    """`changed_finals` with each layer left out; for a streamed model by `final_without_each`, a window at a time."""
    if reading.decoder.stream is None:
        layers = range(reading.structure.num_layers)
        yield changed_finals(reading, ids, [(layer, partial(reading.prefix.without, (layer,))) for layer in layers])
        return
    dense, changed = final_without_each(reading.decoder, ids, folder)
    require_finite_states(reading, ids, dense)
    for number, window in enumerate(track(dense, description)):
        yield window[:-1], changed[:, number, :-1].unbind()


def changed_finals(
    reading: Reading, ids: torch.Tensor, changes: Sequence[Change]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Final states of every predicting position of the windows `ids`, dense and with each of `changes`.

    Each is positions × width. Changes are applied in the order of their first layer, so that only one dense state is
    kept at a time. Raises NonFiniteError naming the layer if a dense state is not finite.
    """
    prefix = reading.prefix
    at, hidden, states = 0, torch.empty(0), dict[int, torch.Tensor]()
    for number in sorted(range(len(changes)), key=lambda number: changes[number][0]):
        first, change = changes[number]
        entry = prefix.entry(first)
        if entry > at:
            at, hidden = entry, prefix.advance(ids, at, hidden, entry)
        with change():
            states[number] = predicting(prefix.finish(ids, at, hidden))
    dense = predicting(prefix.finish(ids, at, hidden))
    require_finite_states(reading, ids, dense)
    return dense, [states[number] for number in range(len(changes))]


def predicting(states: torch.Tensor) -> torch.Tensor:
    """The final states (windows × tokens × width) of the positions that predict a token: positions × width."""
    return states[:, :-1].flatten(0, 1)


def require_finite_states(reading: Reading, ids: torch.Tensor, states: torch.Tensor) -> None:
    """Raise NonFiniteError naming the layer unless all `states` of the dense model on `ids` are finite."""
    require_finite(reading.structure, ids, reading.batch.text, states)


@torch.no_grad()
def final_without_each(decoder: Decoder, ids: torch.Tensor, folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The final states of `ids` by the streamed `decoder`, whole and without each of its layers (layers × states).

    All in one forward: without layer l the state equals the dense one up to l, where another state branches off, and
    all of them go through each layer while it is held. So the files are read once, for L/2 times the multiplications.

    Needs memory for L states, from `room_for`; raises as it does.
    """
    structure, stream = decoder.structure, decoder.stream
    kept: list[torch.Tensor] = []

    def visit(layer: int, hidden: torch.Tensor, run: Run) -> None:
        if not kept:
            kept.append(room_for(structure.num_layers, hidden, folder))
        for state in kept[0][:layer]:
            start = 0
            for piece in run(state.to(hidden.device)):
                state[start : start + len(piece)] = piece
                start += len(piece)
        kept[0][layer] = hidden

    dense = in_one_forward(decoder, ids, visit, "skipping layers, all of them in one forward")
    assert stream is not None
    states = kept[0]
    # What a decoder returns may have another width than the states between layers (Llama 4 returns logits).
    alike = (states[0].shape, states.dtype) == (dense.shape, dense.dtype)
    finals = states if alike else room_for(len(states), dense, folder)
    for final, state in zip(finals, states, strict=True):
        final.copy_(stream.finish(ids, state.to(dense.device)))
    return dense, finals
