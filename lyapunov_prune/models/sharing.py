"""Parameters that two models share once they are equal, and those that layers of one model share."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PIECE = 2**24  # bytes compared at once; a tensor on another device is copied in such pieces
_PAGEOUT = 21  # Linux's MADV_PAGEOUT, which Python does not define


@torch.no_grad()
def share_equal(model: nn.Module, twins: Mapping[str, torch.Tensor]) -> None:
    """Let every parameter of `model` that equals its twin bit by bit use the twin's memory.

    Use it only for a `model` that is not changed afterwards: an in-place change would affect both. For one in mapped
    files (Linux), only the piece being compared is in memory.
    """
    for name, mine in model.named_parameters():
        twin = twins.get(name)
        if twin is not None and _equal(mine, twin):
            mine.data = twin.data


def shared_memo(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy`: the copy has its own parameters, which share the memory of those of `model`."""
    return {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}


@torch.no_grad()
def own(module: nn.Module) -> None:
    """Give the parameters of `module`, which another model may share, their own memory before writing to them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pieces = zip(*(tensor.reshape(-1).view(torch.uint8).split(_PIECE) for tensor in (a, b)), strict=True)
    for x, y in pieces:
        if not torch.equal(x.to(y.device), y):  # compare bytes, since −0 equals 0
            return False
        _let_go(x)
    return True


def _let_go(x: torch.Tensor) -> None:
    """Let the system reclaim the pages of a mapped file that `x` covers; they can be read again.

    Otherwise they count as memory of this process until the last tensor of the file is freed.
    """
    if sys.platform != "linux" or x.device.type != "cpu" or x.untyped_storage().resizable():  # torch's own memory
        return
    first, last = -(-x.data_ptr() // mmap.PAGESIZE), (x.data_ptr() + x.nbytes) // mmap.PAGESIZE
    if first < last:  # kernels without this call keep the pages
        start, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(start, length, _PAGEOUT)


def shared_with(layers: nn.ModuleList, layer: int) -> dict[str, int]:
    """The parameters of a layer that another one holds too, by name, each with the first other such layer."""
    others = [(i, p) for i, other in enumerate(layers) if i != layer for p in other.parameters()]
    held = {p.data_ptr() or id(p): i for i, p in reversed(others)}  # on meta all begin at 0
    own = {name: p.data_ptr() or id(p) for name, p in layers[layer].named_parameters()}
    return {name: held[memory] for name, memory in own.items() if memory in held}
