"""The hidden vector of feed-forward blocks replaced by hooks: the reference for a merged model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lyapunov_prune.linalg import lift
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.models.feedforward import FeedForward
from lyapunov_prune.models.hooked import hooked


def hidden_replaced(
    layers: nn.ModuleList, blocks: Sequence[tuple[FeedForward, HiddenMap]]
) -> AbstractContextManager[None]:
    """Every forward inside the block computes `W_out τ(x) + b_out` for the input x of a feed-forward block.

    The matrix and the bias are the block's own and no product is formed, so a wrong product in a merged model shows up.
    `τ(x)` is computed in float64 and rounded to the dtype of x.
    """
    before: list[tuple[nn.Module, Callable[..., Any]]] = []
    for block, tau in blocks:
        note, replace = _hooks(tau)
        layer = layers[block.layer]
        before.append((layer.get_submodule(block.up.module), note))
        before.append((layer.get_submodule(block.out.module), replace))
    return hooked(before=before)


def _hooks(tau: HiddenMap) -> tuple[Callable[..., None], Callable[..., Any]]:
    given: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(args[0])

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = given.pop()
        return (tau(lift(x)).to(x), *args[1:]), kwargs

    return note, replace
