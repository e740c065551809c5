"""States of a text at many boundaries, in memory or on the disk, and those of a streamed model without each layer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import final_state, require_one_state
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.device import free_memory, numbers_on_disk
from lyapunov_prune.models.streamed import Run
from lyapunov_prune.progress import status
from lyapunov_prune.results.files import require_disk


def room_for(number: int, like: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """An empty tensor of `number` states such as `like`: on its device, or mapped to a file where memory is short.

    Memory is short where not twice as much is free: a layer and what it computes with take theirs. The file is in
    `folder`, None for the temporary one, of no name, and gone when the tensor is.

    Raises LyapunovPruneError, with the bytes that are needed, where the disk has no room either.
    """
    needed, shape = number * like.nbytes, (number, *like.shape)
    if 2 * needed <= free_memory(str(like.device)):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    require_disk(folder, needed, "the states of all layers, for which memory is short,")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return numbers_on_disk(needed // like.itemsize, like.dtype, folder).view(shape)
    except OSError as error:
        raise LyapunovPruneError(
            f"the states of all layers need {needed:,} bytes in {folder}: {error.strerror}; free some, lower --tokens"
        ) from None


@torch.no_grad()
def final_without_each(decoder: Decoder, ids: torch.Tensor, folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The final states of `ids` by the streamed `decoder`, and by it without each of its layers (layers × those).

    In one forward: without layer l it is the dense one up to l, where one more state begins, and all that have begun
    go through a layer while it is held. So the files are read once, for L/2 times the multiplications.
    Memory as `room_for`, of L states; raises as that.
    """
    structure, stream = decoder.structure, decoder.stream
    assert stream is not None
    kept: list[torch.Tensor] = []

    def visit(layer: int, hidden: torch.Tensor, run: Run) -> None:
        if not kept:
            require_one_state(structure, hidden)
            kept.append(room_for(structure.num_layers, hidden, folder))
        for state in kept[0][:layer]:
            start = 0
            for piece in run(state.to(hidden.device)):
                state[start : start + len(piece)] = piece
                start += len(piece)
        kept[0][layer] = hidden

    with stream.visiting(visit), status("skipping layers, all of them in one forward"):
        dense = final_state(structure, ids)
    states = kept[0]
    # What a decoder answers with may be of another width than its layers carry (Llama 4 answers with logits).
    alike = (states[0].shape, states.dtype) == (dense.shape, dense.dtype)
    finals = states if alike else room_for(len(states), dense, folder)
    for final, state in zip(finals, states, strict=True):
        final.copy_(stream.finish(ids, state.to(dense.device)))
    return dense, finals
