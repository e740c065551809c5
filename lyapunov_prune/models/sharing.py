"""Two models that hold the same numbers hold them once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PIECE = 2**24  # bytes compared at once: what lies on another device comes over in such pieces


@torch.no_grad()
def share_equal(model: nn.Module, twins: Mapping[str, torch.Tensor]) -> None:
    """Let every parameter of `model` that is, bit by bit, its twin lie where that does; nothing else changes.

    For a `model` that is only looked at from here on: a later change of one in place would be one of both.
    """
    for name, mine in model.named_parameters():
        twin = twins.get(name)
        if twin is not None and _equal(mine, twin):
            mine.data = twin.data


def shared_memo(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` of `model`: parameters of the copy are its own, and lie where those of `model` do."""
    return {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}


@torch.no_grad()
def own(module: nn.Module) -> None:
    """Give the parameters of `module`, which another model may share, memory of their own, to be written to."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pieces = zip(*(tensor.reshape(-1).view(torch.uint8).split(_PIECE) for tensor in (a, b)), strict=True)
    return all(torch.equal(x.to(y.device), y) for x, y in pieces)  # bytes: −0 is not 0
