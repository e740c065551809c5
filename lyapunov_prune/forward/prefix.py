"""Prefix reuse: begin a forward at a layer, with a hidden state kept from before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from lyapunov_prune.forward.hooks import (
    Enough,
    final_state,
    hidden_of,
    layer_input,
    residual_stream,
    run_backbone,
    skipped,
)
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure

_TOKENS = 32
_SAME = 1e-4


class Prefix:
    """The layers of a model, any of which a forward can begin at or go past.

    The model's own forward makes masks, positions and whatever else it hands to its layers: nothing is
    rebuilt. Where later layers use more of the earlier ones than their hidden state (shared keys and values),
    a forward cannot begin in between. So every boundary is tried once, on a few tokens; `entries` are those from
    which the rest of the model computes what it does in the whole forward, 0 always among them.
    """

    def __init__(self, structure: Structure, ids: torch.Tensor) -> None:
        self.structure = structure
        self._widths: dict[int, int] = {}  # of layers that return a tuple
        ids = ids[:1, :_TOKENS]
        states: list[torch.Tensor] = []
        with (
            hooked(after=[(layer, self._note_width(index)) for index, layer in enumerate(structure.layers)]),
            residual_stream(structure, lambda boundary, hidden: states.append(hidden.clone()), every_layer=False),
        ):
            whole = final_state(structure, ids)
        layers = len(states) - 1
        after = [*states[1:layers], whole, whole]
        # From the last layer down, while each computes the same from its state alone, so do all together.
        self._leave_other_tokens(ids)
        last = layers
        while last > 0 and self._same(last, states[last], ids, after[last], stop=last + 1):
            last -= 1
        entries = list(range(last + 1, layers + 1))
        if last:
            self._leave_other_tokens(ids)
            entries += [k for k in range(last, 0, -1) if self._same(k, states[k], ids, whole, stop=layers)]
        self.entries = (0, *sorted(entries))

    def entry(self, layer: int) -> int:
        """The last boundary, no later than that before `layer`, that a forward can begin at."""
        return max(k for k in self.entries if k <= layer)

    @contextmanager
    def entered(self, boundary: int, hidden: torch.Tensor) -> Iterator[None]:
        """Every forward inside the block begins with the state `hidden` of `boundary`: no layer before it computes.

        At boundary 0 it takes the place of the embedding's, unless it is empty.
        """
        injected = boundary == 0 and hidden.numel() > 0
        first = residual_stream(self.structure, lambda k, h: None, lambda h: hidden, one_state=False, every_layer=False)
        with self._answering(range(boundary), lambda args, kwargs: hidden), first if injected else nullcontext():
            yield

    @contextmanager
    def bypassed(self, layers: Iterable[int]) -> Iterator[None]:
        """Every forward inside the block goes past `layers`: they hand on what they are given."""
        with self._answering(layers, layer_input):
            yield

    @contextmanager
    def without(self, layers: Iterable[int]) -> Iterator[None]:
        """Every forward inside the block leaves out what `layers` add to the stream.

        They are gone past where a forward can begin behind them. Where a later layer wants more of one than
        its hidden state, they compute and their output is dropped (`hooks.skipped`).
        """
        layers = tuple(layers)
        ends = {*self.entries, self.structure.num_layers}
        with self.bypassed(layers) if ends.issuperset(k + 1 for k in layers) else skipped(self.structure, layers):
            yield

    def advance(self, ids: torch.Tensor, start: int, hidden: torch.Tensor | None, stop: int) -> torch.Tensor:
        """The state of boundary `stop` of a forward that begins at `start`; layers from `stop` on do not run."""
        states: list[torch.Tensor] = []

        def arrived(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            states.append(hidden_of(output))
            raise Enough

        entered = self.entered(start, hidden if hidden is not None else torch.empty(0))
        with suppress(Enough), entered, hooked(after=[(self.structure.layers[stop - 1], arrived)]):
            run_backbone(self.structure, ids)
        return states[0]

    def finish(self, ids: torch.Tensor, start: int, hidden: torch.Tensor) -> torch.Tensor:
        """The state that the head reads, of a forward that begins at boundary `start` with `hidden`."""
        with self.entered(start, hidden):
            return final_state(self.structure, ids)

    def _note_width(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                self._widths[index] = len(output)

        return hook

    def _leave_other_tokens(self, ids: torch.Tensor) -> None:
        """What a layer leaves behind on a module is now that of other tokens, until it has computed again."""
        final_state(self.structure, (ids + 1) % self.structure.config.vocab_size)

    def _same(self, start: int, hidden: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor, *, stop: int) -> bool:
        """Whether layers `start … stop − 1` (and, after the last, the final norm) make `wanted` of `hidden`."""
        try:
            if stop < self.structure.num_layers:
                again = self.advance(ids, start, hidden, stop)
            else:
                again = self.finish(ids, start, hidden)
        except Exception:  # a layer that misses what another would have left for it fails in its own way
            return False
        if again.shape != wanted.shape:
            return False
        # Token by token: beside an attention sink the others would look the same whatever they are.
        return bool(((again - wanted).norm(dim=-1) <= _SAME * wanted.norm(dim=-1)).all())

    @contextmanager
    def _answering(
        self, layers: Iterable[int], answer: Callable[[tuple[Any, ...], dict[str, Any]], torch.Tensor]
    ) -> Iterator[None]:
        """`layers` answer in the form that each returns, and are put back as they were."""
        with ExitStack() as stack:
            for index in layers:
                layer, width = self.structure.layers[index], self._widths.get(index, 0)

                def forward(*args: Any, width: int = width, **kwargs: Any) -> Any:
                    hidden = answer(args, kwargs)
                    return (hidden, *[None] * (width - 1)) if width else hidden

                stack.callback(restore, layer, layer.__dict__.get("forward"))
                layer.forward = forward
            yield


def restore(module: nn.Module, before: Any) -> None:
    """Put back `before`, the forward that stood on the instance itself; None: that of its class."""
    if before is None:
        del module.__dict__["forward"]
    else:
        module.forward = before
