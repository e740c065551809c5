"""Digests of a model's weights: one changed bit changes them, a change of dtype does not.

A tensor's bytes are read as rows of 64-bit words `x`, and each row becomes `Σ_j a_j (x_j ⊕ (x_j >> 32)) mod 2^64` with
odd weights `a_j`. Both steps are invertible for each word, so one changed word always changes the sum. Without the
first step a changed sign would flip only the top bit, and two of them would cancel. The digest is the SHA-256 of the
sums. It runs at memory speed on the model's device, and does not protect against deliberate collisions.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from lyapunov_prune.models.quantised import is_packed, packed_tensors

T = TypeVar("T")

# Dtypes that a model of this dtype may be cast to and still count as the same model.
_CASTS = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
}
_WIDTH = 4096  # words per row; the digest depends on it
# Rows per block; the digest does not depend on it. On the CPU a block and its copy fit into the cache.
_ROWS, _ROWS_ELSEWHERE = 16, 1024
_ODD = torch.frombuffer(bytearray(hashlib.shake_256(b"lyapunov-prune").digest(8 * _WIDTH)), dtype=torch.int64) | 1
# The digest of every tensor at the last call, and the answer of `weight_digests` for it.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, dict[str, str]], dict[str, str]]] = (
    weakref.WeakKeyDictionary()
)


def weight_digests(model: nn.Module) -> dict[str, str]:
    """`combined` over the tensors of `model`; every byte is read at each call.

    No cheaper test sees every change: torch does not count writes through `.data`. The digests of rounded weights are
    cached until a weight changes.
    """
    packed = is_packed(model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()] if packed else saved_tensors(model))
    held = _in_threads(tensors, lambda name: _own(tensors[name]))
    known = _known.get(model)
    if known is None or known[0] != held:
        if packed:
            digests = {name: tensor_digests(tensor) for name, tensor in packed_tensors(model)}
        else:
            digests = _in_threads(tensors, lambda name: held[name] | _rounded(tensors[name]))
        known = _known[model] = held, combined(digests)
    return known[1]


def digests_of(names: Collection[str], read: Callable[[str], torch.Tensor]) -> dict[str, dict[str, str]]:
    """`tensor_digests` of `read(name)` for each name; at most four tensors are in memory at a time."""
    return _in_threads(names, lambda name: tensor_digests(read(name)))


def _in_threads(names: Collection[str], work: Callable[[str], T]) -> dict[str, T]:
    threads = torch.get_num_threads()
    if threads == 1:  # handing small tensors to a pool takes as long as the work itself
        return {name: work(name) for name in names}
    torch.set_num_threads(1)  # one thread per tensor is faster than many threads on each of thousands of short steps
    try:
        with ThreadPoolExecutor(min(threads, 4)) as pool:
            return dict(zip(names, pool.map(work, names), strict=True))
    finally:
        torch.set_num_threads(threads)


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a checkpoint of `model`: parameters and persistent buffers; a shared one under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def tensor_digests(tensor: torch.Tensor) -> dict[str, str]:
    """Digests of `tensor` in its own dtype and rounded to each narrower one, by dtype name."""
    return _own(tensor) | _rounded(tensor)


def _own(tensor: torch.Tensor) -> dict[str, str]:
    """The digest of `tensor` in its own dtype, under that dtype's name."""
    return {_name(tensor.dtype): _digest(tensor.detach().reshape(-1), tensor.dtype)}


def _rounded(tensor: torch.Tensor) -> dict[str, str]:
    """The digests of `tensor` rounded to each narrower dtype, by dtype name."""
    flat = tensor.detach().reshape(-1)
    return {_name(dtype): _digest(flat, dtype) for dtype in _CASTS.get(tensor.dtype, ())}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def combined(tensors: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """One digest per dtype over the `tensor_digests` of all names, whatever their order.

    The unrounded weights are keyed by their dtype, or by several joined with `+`; rounded ones by each dtype that is
    narrower than all of these. If two models are equal, or one was cast from the other, they agree under every key that
    both have. Tensors of integers are not rounded.
    """
    named = sorted(tensors.items())
    own = [next(iter(digests)) for _, digests in named]  # the first key is the tensor's own dtype
    floating = [set(of) for (_, of), dtype in zip(named, own, strict=True) if getattr(torch, dtype).is_floating_point]
    exact = "+".join(sorted({dtype for dtype in own if getattr(torch, dtype).is_floating_point}))
    whole = {}
    for form in sorted({exact, *set.intersection(*floating)}):
        lines = [f"{name} {of.get(form, of[dtype])}\n" for (name, of), dtype in zip(named, own, strict=True)]
        whole[form] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return whole


def _digest(flat: torch.Tensor, dtype: torch.dtype) -> str:
    row, size = 8 * _WIDTH // dtype.itemsize, flat.numel()
    whole, height = hashlib.sha256(str(size).encode()), -(-size // row)
    if height == 1 and flat.device.type == "cpu":  # no block: numpy starts faster on a small tensor than torch
        held = flat.to(dtype).view(torch.uint8).numpy().tobytes()
        x = np.frombuffer(held.ljust(-(-len(held) // 8) * 8, b"\0"), np.int64)  # words that are zero add nothing
        whole.update(((x >> 32 ^ x) * _ODD.numpy()[: len(x)]).sum().tobytes())
        return whole.hexdigest()
    rows = min(_ROWS if flat.device.type == "cpu" else _ROWS_ELSEWHERE, height)
    block = torch.zeros(rows * row, dtype=dtype, device=flat.device)
    words, odd = block.view(torch.int64).view(rows, _WIDTH), _ODD.to(flat.device)
    mixed, sums = torch.empty_like(words), []
    for part in flat.split(rows * row) if rows else ():
        block[: len(part)].copy_(part)
        block[len(part) :].zero_()
        torch.bitwise_right_shift(words, 32, out=mixed).bitwise_xor_(words).mul_(odd)
        sums.append(mixed.sum(dim=1))
    if sums:
        whole.update(torch.cat(sums)[:height].cpu().numpy().data)
    return whole.hexdigest()
