"""A dense and a compressed model with aligned layers, so that a layer of either can run in place of the other's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import final_state, require_finite, residual_stream
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.states import KeptStates
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import require_versions
from lyapunov_prune.pruning.provenance import made_by

_TRIED = 32  # tokens to check, as many as `Prefix` tries
_AT_ONCE = 1024  # tokens of several states that run through a layer in one batch


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models, with its layers numbered as in the dense one.

    `layers` holds the dense model's number of each layer of this model. A layer that this model lacks passes on its
    input. States of a streamed model are kept in `folder` if memory is short.
    """

    reading: Reading
    layers: tuple[int, ...]
    total: int  # layers of the dense model
    folder: Path | None = None

    @cached_property
    def begins(self) -> list[int]:
        """This model's boundary at each boundary 0 … `total` of the dense model."""
        return [sum(layer < boundary for layer in self.layers) for boundary in range(self.total + 1)]

    def kept(self, windows: int) -> KeptStates:
        """Storage for up to `total` + 1 states of this many windows."""
        on_disk = self.reading.decoder.stream is not None
        return KeptStates(self.total + 1, windows, on_disk=on_disk, folder=self.folder)

    def states(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The states at the boundaries 0 … `total` from one whole forward, and the state that the head reads.

        Raises like `require_finite`.
        """
        seen = self.kept(len(ids))

        def visit(boundary: int, hidden: torch.Tensor) -> None:
            for number, own in enumerate(self.begins):
                if own == boundary:
                    seen.add(number, hidden)

        structure = self.reading.structure
        with residual_stream(structure, visit):
            final = final_state(structure, ids.to(self.reading.model.device))
        self.require_finite(ids, *seen.values(), final)
        return [seen[number] for number in range(self.total + 1)], final

    def held(self, layer: int) -> AbstractContextManager[None]:
        """Inside the block the weights of `layer` are in memory, even if the model is streamed."""
        begin, end = self.begins[layer : layer + 2]
        return nullcontext() if begin == end else layer_held(self.reading.model, begin)

    def require_finite(self, ids: torch.Tensor, *made: torch.Tensor) -> None:
        """`hooks.require_finite` of this side: it names the layer in the model's own numbers."""
        model, batch = self.reading.model, self.reading.batch
        name = model.config._name_or_path or type(model).__name__
        require_finite(self.reading.structure, ids.to(model.device), f"{name} on {batch.text}", *made)

    def run(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The output of `layer` (the dense model's number) for the input `hidden`."""
        hidden = self._own(hidden)
        begin, end = self.begins[layer : layer + 2]
        return hidden if begin == end else self.reading.prefix.advance(ids.to(hidden.device), begin, hidden, end)

    def run_each(self, layer: int, ids: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Replace each of `states` by the output of `layer` for it; several states run through it in one batch."""
        most = max(1, _AT_ONCE // ids.numel())
        for start in range(0, len(states), most):
            some = states[start : start + most]
            left = self.run(layer, ids.repeat(len(some), 1), torch.cat([self._own(state) for state in some]))
            for state, after in zip(some, left.split(len(ids)), strict=True):
                state.copy_(after)

    def finish_each(self, ids: torch.Tensor, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The states that the head reads if each of `states` leaves the last layer."""
        hidden = torch.cat([self._own(state) for state in states])
        ids = ids.to(hidden.device).repeat(len(states), 1)
        return self.reading.prefix.finish(ids, self.begins[-1], hidden).chunk(len(states))

    def _own(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(self.reading.model.device, self.reading.model.dtype)


def pair_up(
    dense: Decoder, compressed: Decoder, batch: Readable, kept: Sequence[int] | None, folder: Path | None
) -> tuple[Side, Side]:
    """Both models on the same batch, with layers aligned by `kept` (`kept_layers` if None).

    Raises NonFiniteError like `Side.require_finite`, and LyapunovPruneError for models of different families, widths or
    vocabularies, for layers that do not fit, if only one is streamed, and if a layer needs more of the earlier ones
    than their hidden state.
    """
    if (dense.stream is None) != (compressed.stream is None):
        raise LyapunovPruneError("one model is streamed and the other in memory; load both with load_streamed, or none")
    first = read(dense, batch)
    second = read(compressed, first.batch)
    mine, theirs = first.structure, second.structure
    layers = kept_layers(dense, compressed) if kept is None else tuple(kept)
    require_versions(mine, theirs)
    _require_fitting(layers, theirs.num_layers, mine.num_layers)
    total = mine.num_layers
    sides = Side(first, tuple(range(total)), total, folder), Side(second, layers, total, folder)
    for side in sides:
        side.require_finite(side.reading.windows(1)[0][:, :_TRIED])  # otherwise a forward could not begin in between
        missing = set(range(side.reading.structure.num_layers + 1)) - set(side.reading.prefix.entries)
        if missing:
            raise LyapunovPruneError(
                f"layer {min(missing)} of {type(side.reading.model).__name__} uses more of earlier layers than their "
                "output, so its own error cannot be separated from theirs; explain does not support this decoder"
            )
    return sides


def kept_layers(dense: Decoder, compressed: Decoder) -> tuple[int, ...]:
    """The number in `dense` of every layer of `compressed`, from its provenance if layers were removed.

    Raises LyapunovPruneError for models of different families, widths or vocabularies, if there is no provenance, or it
    is of a dense model with another number of layers.
    """
    require_versions(dense.structure, compressed.structure)
    own, total = compressed.structure.num_layers, dense.structure.num_layers
    if own == total:
        return tuple(range(total))
    name = compressed.model.config._name_or_path
    provenance = made_by(name)
    if provenance is None or provenance.plan.model.num_layers != total:
        why = "no provenance says which are left; give the folder or file that prune wrote, or in Python kept=plan.kept"
        if provenance is not None:
            of = provenance.plan.model.num_layers
            why = f"it was made from {provenance.source!r} of {of} layers; give that one as the dense model"
        raise LyapunovPruneError(f"the compressed model has {own} layers and the dense one {total}, and {why}")
    return provenance.kept_to_original


def _require_fitting(layers: tuple[int, ...], own: int, total: int) -> None:
    rises = all(a < b for a, b in pairwise(layers))
    if len(layers) != own or not rises or not all(0 <= layer < total for layer in layers):
        raise LyapunovPruneError(
            f"{len(layers)} layers of the dense model ({', '.join(map(str, layers[:8]))}…) do not fit the {own} layers "
            f"of the compressed one; give {own} rising numbers from 0 to {total - 1}"
        )
