"""Prefix reuse: begin a forward at a layer, with a hidden state kept from before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lyapunov_prune.models.structure import Structure
from lyapunov_prune.tracing import Enough, layer_input, residual_stream, run_backbone

_TOKENS = 32
_SAME = 1e-4


class Prefix:
    """The layers of a model, any of which a forward can begin at or go past.

    The model's own forward makes masks, positions and whatever else it hands to its layers: nothing is
    rebuilt. Where later layers use more of the earlier ones than their hidden state (shared keys and values),
    a forward cannot begin in between. So every boundary is tried once, on a few tokens, against the whole
    forward; `entries` are those where both agree, 0 always among them.
    """

    def __init__(self, structure: Structure, ids: torch.Tensor) -> None:
        self.structure = structure
        self._widths: dict[int, int] = {}  # of layers that return a tuple
        ids = ids[:1, :_TOKENS]
        states: list[torch.Tensor] = []
        handles = [layer.register_forward_hook(self._note_width(index)) for index, layer in enumerate(structure.layers)]
        try:
            with residual_stream(structure, lambda boundary, hidden: states.append(hidden.clone())):
                whole = final_state(structure, ids)
        finally:
            for handle in handles:
                handle.remove()
        # What a layer leaves behind on a module is now that of other tokens, and, from the last boundary to the
        # first, stays so until the layer itself has computed again.
        final_state(structure, (ids + 1) % structure.config.vocab_size)
        found = [k for k in range(len(states) - 1, 0, -1) if self._reproduces(k, states[k], ids, whole)]
        self.entries = (0, *reversed(found))

    def entry(self, layer: int) -> int:
        """The last boundary, no later than that before `layer`, that a forward can begin at."""
        return max(k for k in self.entries if k <= layer)

    @contextmanager
    def entered(self, boundary: int, hidden: torch.Tensor) -> Iterator[None]:
        """Every forward inside the block begins with the state `hidden` of `boundary`: no layer before it computes."""
        with self._answering(range(boundary), lambda args, kwargs: hidden):
            yield

    @contextmanager
    def bypassed(self, layers: Iterable[int]) -> Iterator[None]:
        """Every forward inside the block goes past `layers`: they hand on what they are given."""
        with self._answering(layers, layer_input):
            yield

    def advance(self, ids: torch.Tensor, start: int, hidden: torch.Tensor | None, stop: int) -> torch.Tensor:
        """The state of boundary `stop` of a forward that begins at `start`; layers from `stop` on do not run."""
        found: list[torch.Tensor] = []

        def arrived(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(layer_input(args, kwargs))
            raise Enough

        handle = self.structure.layers[stop].register_forward_pre_hook(arrived, with_kwargs=True)
        try:
            with suppress(Enough), self.entered(start, hidden if hidden is not None else torch.empty(0)):
                run_backbone(self.structure, ids)
        finally:
            handle.remove()
        return found[0]

    def _note_width(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                self._widths[index] = len(output)

        return hook

    def _reproduces(self, boundary: int, hidden: torch.Tensor, ids: torch.Tensor, whole: torch.Tensor) -> bool:
        try:
            with self.entered(boundary, hidden):
                again = final_state(self.structure, ids)
        except Exception:  # a layer that misses what another would have left for it fails in its own way
            return False
        return again.shape == whole.shape and bool((again - whole).abs().max() <= _SAME * whole.abs().max())

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

                stack.callback(_restore, layer, layer.__dict__.get("forward"))
                layer.forward = forward
            yield


def _restore(layer: nn.Module, before: Any) -> None:
    if before is None:
        del layer.__dict__["forward"]
    else:
        layer.forward = before


def final_state(structure: Structure, ids: torch.Tensor) -> torch.Tensor:
    """The state that the head reads, after the final norm: windows × tokens × width."""
    found: list[torch.Tensor] = []
    handle = structure.backbone.register_forward_hook(lambda module, args, output: found.append(output[0]))
    try:
        run_backbone(structure, ids)
    finally:
        handle.remove()
    return found[0]
