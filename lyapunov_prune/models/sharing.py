"""Two models that hold the same numbers hold them once."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PIECE = 2**24  # bytes compared at once: what lies on another device comes over in such pieces
_PAGEOUT = 21  # MADV_PAGEOUT of Linux, which Python does not name


@torch.no_grad()
def share_equal(model: nn.Module, twins: Mapping[str, torch.Tensor]) -> None:
    """Let every parameter of `model` that is, bit by bit, its twin lie where that does; nothing else changes.

    For a `model` that is only looked at from here on: a later change of one in place would be one of both. Of a model
    that lies in mapped files a piece is in memory as long as it is compared (Linux).
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
    for x, y in pieces:
        if not torch.equal(x.to(y.device), y):  # bytes: −0 is not 0
            return False
        _let_go(x)
    return True


def _let_go(x: torch.Tensor) -> None:
    """Let the system take back the pages of a mapped file that `x` fills; nothing is lost, they can be read again.

    They count as memory of this process until the last tensor in the file is gone.
    """
    if sys.platform != "linux" or x.device.type != "cpu" or x.untyped_storage().resizable():  # torch's own memory is
        return
    first, last = -(-x.data_ptr() // mmap.PAGESIZE), (x.data_ptr() + x.nbytes) // mmap.PAGESIZE
    if first < last:  # where the kernel does not know how, it stays
        start, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(start, length, _PAGEOUT)
