"""The sums of squared gradients of a streamed model, whose layers run forwards once and backwards once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from lyapunov_prune.budget.gradients import groups_of, room_for_sums, slope, squared
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import own_windows, summed
from lyapunov_prune.forward.hooks import final_state, residual_stream
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.states import KeptStates
from lyapunov_prune.models.streamed import layer_held, stream_of
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track

_By = dict[int | None, dict[str, nn.Parameter]]


def layer_by_layer(
    reading: Reading, matrices: Mapping[str, nn.Parameter], seed: int, folder: Path | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The name and the sum (float32) of each of `matrices`, that of a layer while it is held.

    A forward of all windows keeps the state before every layer, in a file in `folder` if memory is short (`room_for`).
    Then the gradient of each window goes back from the logits through one layer after the other, which runs again on
    the state that was kept; the matrices outside the layers come last. Memory: a layer, its gradients and their sums,
    and two states of all windows.

    Raises LyapunovPruneError for a matrix that several layers share, and as `Stream.run`.
    """
    model, layers = reading.model, reading.structure.num_layers
    by_layer, back = _by_layer(reading, matrices), _Backwards(reading, seed, folder)
    outside, room = by_layer.pop(None, {}), room_for_sums(reading)
    for layer in track(range(layers)[::-1], "costs, one layer at a time"):
        with layer_held(model, layer):
            entering = back.slopes
            for group in groups_of(by_layer.get(layer, {}), room) or [[]]:
                sums, entering = back.through(layer, group, [*outside.values()])
                for name in group:
                    yield name, sums.pop(name)
            back.slopes = entering
    for group in groups_of(outside, room):
        yield from back.beside(group).items()


def _by_layer(reading: Reading, matrices: Mapping[str, nn.Parameter]) -> _By:
    """`matrices` by the layer that holds them, None outside. Raises LyapunovPruneError for one in several places."""
    places: dict[int, set[int | None]] = {}
    for name, p in reading.model.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), set()).add(reading.structure.layer_of(name))
    found: _By = {}
    for name, p in matrices.items():
        if len(places[id(p)]) > 1:
            raise LyapunovPruneError(f"several layers share {name}; load the model whole (without --device disk)")
        found.setdefault(reading.structure.layer_of(name), {})[name] = p
    return found


class _Backwards:
    """The windows of this process, their states at the boundaries 0 … L, and the gradient where it has come to.

    `slopes` (windows × tokens × width) is that of the negative log-likelihood of drawn labels, first for the states
    that leave the last layer.
    """

    def __init__(self, reading: Reading, seed: int, folder: Path | None) -> None:
        stream = stream_of(reading.model)
        assert stream is not None
        self.model, self._stream, self._seed = reading.model, stream, seed
        self._numbers = own_windows(reading)
        self._ids = reading.batch.ids[self._numbers].to(reading.model.device)
        self._states = KeptStates(reading.structure.num_layers + 1, len(self._ids), on_disk=True, folder=folder)
        self._run(reading)
        self.slopes = self._leaving()

    @in_eval_mode
    def _run(self, reading: Reading) -> None:
        with residual_stream(reading.structure, self._states.add, one_state=False):
            final_state(reading.structure, self._ids)

    @in_eval_mode
    def _leaving(self) -> torch.Tensor:
        slopes = torch.empty_like(self._last)
        with squared(self.model, {}):
            for row, (ids, state) in enumerate(self._windows(self._last)):
                _, logits = self._stream.ends(ids, state.requires_grad_())
                logits.backward(slope(logits, self._seed, self._numbers[row]))
                slopes[row] = _gradient(state)
        return slopes

    @in_eval_mode
    def through(
        self, layer: int, names: Sequence[str], outside: Sequence[nn.Parameter]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The sums of the matrices `names` of a layer, and the gradient for the states that enter it."""
        entering = torch.empty_like(self.slopes)
        with squared(self.model, {name: self.model.get_parameter(name) for name in names}, outside) as sums:
            for row, (ids, state, given) in enumerate(self._windows(self._states[layer], self.slopes)):
                # Cloned, since a layer may change its input in place.
                self._stream.run(layer, ids, state.requires_grad_().clone()).backward(given)
                entering[row] = _gradient(state)
        summed(self.model, *sums.values())
        return sums, entering

    @in_eval_mode
    def beside(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The sums of the matrices `names` outside the layers, once `slopes` is that of the states before the first.

        One backward from there and from the logits brings a matrix that is embedding and head the sum of both.
        """
        with squared(self.model, {name: self.model.get_parameter(name) for name in names}) as sums:
            for row, (ids, state, given) in enumerate(self._windows(self._last, self.slopes)):
                entering, logits = self._stream.ends(ids, state)
                both = [(logits, slope(logits, self._seed, self._numbers[row])), (entering, given)]
                ends, slopes = zip(*((end, of_it) for end, of_it in both if end.requires_grad), strict=True)
                torch.autograd.backward(ends, slopes)
        summed(self.model, *sums.values())
        return sums

    @property
    def _last(self) -> torch.Tensor:
        return self._states[len(self._states) - 1]

    def _windows(self, *of: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The ids of each window, and a copy of its part of each of `of`."""
        for row, ids in enumerate(self._ids):
            yield ids[None], *(each[row, None].clone().to(ids.device) for each in of)


def _gradient(state: torch.Tensor) -> torch.Tensor:
    assert state.grad is not None
    return state.grad[0]
