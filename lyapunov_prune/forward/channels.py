"""Hidden channels of feed-forward blocks taken out by hooks: the reference for a model without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.models.width import find_blocks


def masked(
    structure: Structure, kept: torch.Tensor, refits: Sequence[torch.Tensor] = ()
) -> AbstractContextManager[None]:
    """Inside the block all hidden channels but `kept` (layers × channels) are zero where they enter the last matrix.

    With `refits` the last matrix of layer l is `refits[l]` (d × kept channels). An empty `kept` changes nothing. Raises
    LyapunovPruneError as `find_blocks`.
    """
    if not len(kept):
        return hooked()
    modules = [
        layer.get_submodule(b.out.module) for b, layer in zip(find_blocks(structure), structure.layers, strict=True)
    ]
    if refits:
        return hooked(after=[(module, _multiply(*each)) for module, *each in zip(modules, kept, refits, strict=True)])
    return hooked(before=[(module, _mask(stays)) for module, stays in zip(modules, kept, strict=True)])


def _mask(stays: torch.Tensor) -> Callable[..., Any]:
    def mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole, index = args[0], stays.to(args[0].device)
        return (torch.zeros_like(whole).index_copy(-1, index, whole.index_select(-1, index)), *args[1:]), kwargs

    return mask


def _multiply(stays: torch.Tensor, weight: torch.Tensor) -> Callable[..., Any]:
    def multiply(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        return linear(args[0].index_select(-1, stays.to(output.device)), weight.to(output), module.bias)

    return multiply
