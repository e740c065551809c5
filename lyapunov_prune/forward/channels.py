"""Hidden channels of feed-forward blocks masked by hooks: the reference for a model without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.models.width import find_blocks


def masked(structure: Structure, channels: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Inside the block the hidden channels `channels[l]` of layer l are zero where they enter its last matrix.

    Without `channels` nothing changes. Raises LyapunovPruneError as `find_blocks`.
    """
    if not channels:
        return hooked()
    blocks = zip(find_blocks(structure), structure.layers, channels, strict=True)
    return hooked(before=[(layer.get_submodule(block.out.module), _hook(gone)) for block, layer, gone in blocks])


def _hook(gone: Sequence[int]) -> Callable[..., Any]:
    def mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = torch.tensor(gone, device=args[0].device)
        return (args[0].index_fill(-1, index, 0), *args[1:]), kwargs

    return mask
