"""Hidden channels of feed-forward blocks masked by hooks: the reference for a model without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import Structure


def masked(
    structure: Structure, kept: Mapping[int, torch.Tensor], refits: Sequence[torch.Tensor] = ()
) -> AbstractContextManager[None]:
    """Inside the block, all hidden channels of a layer except those in `kept` are zero at the input of the last matrix.

    Layers that are not in `kept` do not change. `refits` (d × kept channels, one per entry of `kept`), if given,
    replace the last matrices. Raises LyapunovPruneError as `find_feedforward` does.
    """
    blocks = [find_feedforward(structure, layer) for layer in kept]
    modules = [structure.layers[b.layer].get_submodule(b.out.module) for b in blocks]
    if refits:
        each = zip(modules, kept.values(), refits, strict=True)
        return hooked(after=[(module, _multiply(stays, weight)) for module, stays, weight in each])
    return hooked(before=[(module, _mask(stays)) for module, stays in zip(modules, kept.values(), strict=True)])


def _mask(stays: torch.Tensor) -> Callable[..., Any]:
    def mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole, index = args[0], stays.to(args[0].device)
        return (torch.zeros_like(whole).index_copy(-1, index, whole.index_select(-1, index)), *args[1:]), kwargs

    return mask


def _multiply(stays: torch.Tensor, weight: torch.Tensor) -> Callable[..., Any]:
    def multiply(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        return linear(args[0].index_select(-1, stays.to(output.device)), weight.to(output), module.bias)

    return multiply
