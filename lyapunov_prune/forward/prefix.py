"""Begin a forward at any layer, with a hidden state from an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lyapunov_prune.forward.hooks import (
    final_state,
    hidden_of,
    layer_input,
    require_run,
    residual_stream,
    run_up_to,
    skipped,
)
from lyapunov_prune.models.hooked import hooked, overridden
from lyapunov_prune.models.structure import Structure

_TOKENS = 32
_SAME = 1e-4


class Prefix:
    """The layers of a model, at any of which a forward can begin or be skipped.

    The model's own forward makes masks, positions and all other arguments of its layers. If later layers use more of
    earlier ones than their hidden state (shared keys and values), a forward cannot begin in between. So every boundary
    is tested once, on a few tokens. `entries` are those from which the rest of the model gives the same as in the whole
    forward; 0 is always one.
    """

    def __init__(self, structure: Structure, ids: torch.Tensor) -> None:
        self.structure = structure
        self._widths: dict[int, int] = {}  # lengths of the tuples that layers return
        ids = ids[:1, :_TOKENS]
        states: list[torch.Tensor] = []
        with (
            hooked(after=[(layer, partial(self._note_width, index)) for index, layer in enumerate(structure.layers)]),
            residual_stream(
                structure,
                lambda boundary, hidden: states.append(hidden.clone()),
                one_state=False,
                every_layer=False,
            ),
        ):
            whole = final_state(structure, ids)
        layers = len(states) - 1
        after = [*states[1:layers], whole, whole]
        # From the last layer down: if each gives the same from its input state alone, so do all of them together.
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
        """The last boundary at or before the input of `layer` where a forward can begin."""
        return max(k for k in self.entries if k <= layer)

    @contextmanager
    def entered(self, boundary: int, hidden: torch.Tensor) -> Iterator[None]:
        """Every forward inside the block begins with the state `hidden` at `boundary`; earlier layers do not compute.

        At boundary 0 it replaces the embedding's output, unless `hidden` is empty.
        """
        injected = boundary == 0 and hidden.numel() > 0
        first = residual_stream(self.structure, lambda k, h: None, lambda h: hidden, one_state=False, every_layer=False)
        with self._answering(range(boundary), lambda args, kwargs: hidden), first if injected else nullcontext():
            yield

    @contextmanager
    def bypassed(self, layers: Iterable[int]) -> Iterator[None]:
        """In every forward inside the block, `layers` return their input without computing."""
        with self._answering(layers, layer_input):
            yield

    @contextmanager
    def without(self, layers: Iterable[int]) -> Iterator[None]:
        """Every forward inside the block leaves out what `layers` add to the residual stream.

        They do not compute if a forward can begin after each of them. Otherwise later layers need more than their
        hidden state, so they compute and their output is dropped (`hooks.skipped`).
        """
        layers = tuple(layers)
        ends = {*self.entries, self.structure.num_layers}
        with self.bypassed(layers) if ends.issuperset(k + 1 for k in layers) else skipped(self.structure, layers):
            yield

    def advance(self, ids: torch.Tensor, start: int, hidden: torch.Tensor | None, stop: int) -> torch.Tensor:
        """The state at boundary `stop` of a forward that begins at `start`; layers from `stop` on do not run.

        Raises LyapunovPruneError if the layer before `stop` does not run on text alone (Mllama's cross-attention).
        """
        states: list[torch.Tensor] = []

        def arrived(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            states.append(hidden_of(output))

        with self.entered(start, hidden if hidden is not None else torch.empty(0)):
            run_up_to(self.structure, self.structure.layers[stop - 1], ids, arrived)
        require_run(self.structure, stop - 1, bool(states), "give a decoder whose layers all do")
        return states[0]

    def finish(self, ids: torch.Tensor, start: int, hidden: torch.Tensor) -> torch.Tensor:
        """The state that the head reads, in a forward that begins at boundary `start` with `hidden`."""
        with self.entered(start, hidden):
            return final_state(self.structure, ids)

    def _note_width(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            self._widths[index] = len(output)

    def _leave_other_tokens(self, ids: torch.Tensor) -> None:
        """Overwrite what layers store on modules with that of other tokens, to reveal its use."""
        final_state(self.structure, (ids + 1) % self.structure.config.vocab_size)

    def _same(self, start: int, hidden: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor, *, stop: int) -> bool:
        """Whether layers `start … stop − 1` (and after the last the final norm) turn `hidden` into `wanted`."""
        try:
            if stop < self.structure.num_layers:
                again = self.advance(ids, start, hidden, stop)
            else:
                again = self.finish(ids, start, hidden)
        except Exception:  # without what others should have left for it, a layer fails in its own way
            return False
        if again.shape != wanted.shape:
            return False
        # By token: next to an attention sink, differences of the other tokens would vanish in the norm.
        return bool(((again - wanted).norm(dim=-1) <= _SAME * wanted.norm(dim=-1)).all())

    @contextmanager
    def _answering(
        self, layers: Iterable[int], answer: Callable[[tuple[Any, ...], dict[str, Any]], torch.Tensor]
    ) -> Iterator[None]:
        """`layers` return `answer`, in the form each uses, and are restored afterwards."""
        with ExitStack() as stack:
            for index in layers:
                layer, width = self.structure.layers[index], self._widths.get(index, 0)

                def forward(*args: Any, width: int = width, **kwargs: Any) -> Any:
                    hidden = answer(args, kwargs)
                    return (hidden, *[None] * (width - 1)) if width else hidden

                stack.enter_context(overridden(layer, forward))
            yield
