"""Where the state after a changed layer is read: at the end of the layer, or after the sublayer that runs first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lyapunov_prune.forward.hooks import layer_input, require_finite, residual_stream, run_backbone
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.models.hooked import hooked

ReadAt = Literal["layer", "branch"]


def dense_states(
    prefix: Prefix, ids: torch.Tensor, text: str, places: dict[int, nn.Module]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """The dense state at every layer boundary (windows × tokens × width), and the input of each of `places`."""
    states: list[torch.Tensor] = []
    with ExitStack() as stack:
        between = {layer: stack.enter_context(_entering(module, ids)) for layer, module in places.items()}
        stack.enter_context(residual_stream(prefix.structure, lambda boundary, hidden: states.append(hidden)))
        run_backbone(prefix.structure, ids)
    require_finite(prefix.structure, ids, text, states[-1])
    return states, {layer: found[-1] for layer, found in between.items()}


def changed_state(
    prefix: Prefix,
    ids: torch.Tensor,
    states: list[torch.Tensor],
    layer: int,
    change: AbstractContextManager[None],
    place: nn.Module | None,
) -> torch.Tensor:
    """The output of `layer` (or the input of `place`) when the layer runs changed on its dense input."""
    with ExitStack() as stack:
        entering = None if place is None else stack.enter_context(_entering(place, ids))
        stack.enter_context(change)
        start = prefix.entry(layer)
        end = prefix.advance(ids, start, states[start], layer + 1)
    return end if entering is None else entering[-1]


@contextmanager
def _entering(module: nn.Module, ids: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Record the inputs (windows × tokens × width) of `module` inside the block."""
    found: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(layer_input(args, kwargs).view(*ids.shape, -1))  # OPT flattens all tokens into one row

    with hooked(before=[(module, note)]):
        yield found
