"""One pass over the bytes of a checkpoint, a piece of a tensor at a time.

What is certain is looked for in every byte: numbers and scales that are not finite, the largest number, rows and
tensors of one value. The distribution of a tensor is that of a sample of its blocks or rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES

from lyapunov_prune.diagnosis.stored import FileTensor, Stored
from lyapunov_prune.models.ggml import Kind, dequantised
from lyapunov_prune.models.weight_files import fill
from lyapunov_prune.progress import track

_PIECE = 2**21  # bytes looked at together: they stay in the CPU's cache
_SAMPLE = 2**16  # numbers of a tensor whose distribution is looked at
_RUN = 32  # numbers in a row that are looked at together, as they share a scale in most types
# Type -> integers of its width, and the bits of infinity there: those of larger numbers are NaN.
_FLOATS: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64")
# Where the float16 scales are in a block of llama.cpp's types, in bytes.
_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
_VARIED = 4  # different bytes in a block that holds more than one number; zeros are written with three at most


@dataclass(eq=False)
class TensorStatistics:
    """What one pass over the bytes of a tensor found.

    `numbers` counts what was looked at: numbers, or blocks of a quantised type. `bad` are those that are not finite,
    or scales that are not, and `lost` the blocks whose scale is zero although their integers differ; `first` is the
    number of the first row of these. `at_end` counts numbers at the end of float16, ±65504. `largest` is the largest
    magnitude (of a sample where quantised). `still` are rows of one value other than zero, and `empty` rows of zeros.

    `sample` are rows of numbers, (rows, up to 4096), float32, NaN where they are not finite; None for packed integers,
    which `packed` reads. `digest` is that of a part of the bytes: equal tensors have equal ones.
    """

    part: FileTensor
    numbers: int = 0
    bad: int = 0
    lost: int = 0
    first: int = 0
    at_end: int = 0
    still: int = 0
    empty: int = 0
    rows: int = 0
    digest: bytes = b""
    sample: np.ndarray | None = None
    _taken: list[np.ndarray] = field(default_factory=list)

    @cached_property
    def known(self) -> np.ndarray:
        """The finite numbers of the sample, itself if all are."""
        if self.sample is None:
            return np.zeros(0, np.float32)
        finite = np.isfinite(self.sample)
        return self.sample.ravel() if finite.all() else self.sample[finite]

    @property
    def is_wide(self) -> bool:
        """Whether it is a matrix, or more, whose rows hold 16 numbers at least."""
        return self.rows > 1 and self.part.shape[-1] >= 16

    @property
    def is_read(self) -> bool:
        """Whether it is wide, and its numbers are known."""
        return self.is_wide and len(self.known) > 0

    @property
    def saturated(self) -> float:
        """The share of runs of 32 numbers in which 29 or more are at the run's largest or smallest number."""
        if self.sample is None or self.sample.shape[-1] < _RUN:
            return 0.0
        runs = self.sample[:, : self.sample.shape[-1] // _RUN * _RUN].reshape(-1, _RUN)
        low, high = runs.min(1, keepdims=True), runs.max(1, keepdims=True)
        ends = ((runs == low) | (runs == high)).sum(1)
        return float(((ends >= 29) & (low < 0)[:, 0] & (high > 0)[:, 0]).mean())


def look(stored: Stored) -> dict[str, TensorStatistics]:
    """The statistics of every tensor whose bytes are there, by name; the files are read once, in order."""
    parts = sorted(stored.parts.values(), key=lambda part: (part.file, part.start))
    return {part.name: statistics_of(part) for part in track(parts, "reading", lambda part: part.size)}


def statistics_of(part: FileTensor) -> TensorStatistics:
    """Read all bytes of `part` once. Memory: two megabytes, and a sample of the tensor."""
    found = TensorStatistics(part)
    width = part.shape[-1] if part.shape else 1
    rows = prod(part.shape[:-1]) if part.shape else 1
    if not rows or not width or not part.size or part.size % rows:
        return found
    row_bytes = part.size // rows
    if len(part.shape) < 2:  # a vector is one row
        found.rows = 0
    else:
        found.rows = rows
    every = max(1, rows * min(width, 4096) // _SAMPLE)
    digest = hashlib.blake2b(f"{part.dtype} {part.shape}".encode(), digest_size=16)
    at = 0
    for piece in _pieces(part, row_bytes):
        digest.update(piece[:: max(1, len(piece) // 64), : 2**12].tobytes())
        _add(found, piece, at, every)
        at += len(piece)
    found.digest = digest.digest()
    if found._taken:
        found.sample = np.concatenate(found._taken)
        found._taken.clear()
    return found


def row_of(part: FileTensor, row: int) -> np.ndarray:
    """The numbers of one row of a matrix, as far as they are sampled; NaN is 0."""
    size = part.size // prod(part.shape[:-1])
    bytes_of = np.fromfile(part.file, np.uint8, size, offset=part.start + row * size)
    return np.nan_to_num(_numbers_of(bytes_of[None], part.dtype)[0])


def _pieces(part: FileTensor, row_bytes: int) -> Iterator[np.ndarray]:
    """The bytes of `part` as (rows, bytes of a row), a few rows at a time, in a buffer that is used again."""
    count = max(1, _PIECE // row_bytes)
    buffer = np.empty((min(count, part.size // row_bytes), row_bytes), np.uint8)
    left = part.size // row_bytes
    with part.file.open("rb", buffering=0) as file:
        file.seek(part.start)
        while left:
            piece = buffer[: min(left, len(buffer))]
            fill(memoryview(piece.reshape(-1).data), file)
            yield piece
            left -= len(piece)


def _add(found: TensorStatistics, piece: np.ndarray, at: int, every: int) -> None:
    part = found.part
    bad, first = None, not (found.bad or found.lost)
    chosen = piece[-at % every :: every]
    if part.dtype in _FLOATS:
        bad = _add_floats(found, piece)
    elif part.dtype in _SCALES:
        bad = _add_blocks(found, piece)
    if len(chosen) and part.dtype not in _INTEGERS:
        found._taken.append(_numbers_of(chosen, part.dtype))
    if bad is not None and bad.any() and first:
        found.first = at + int(np.argmax(bad))


def _numbers_of(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The first numbers of rows as they lie in the file; none of a type that is not known."""
    if dtype in _FLOATS:
        return as_floats(rows, dtype)[:, :4096]
    if dtype not in Kind.__members__:
        return np.zeros((0, 1), np.float32)
    items, size = GGML_QUANT_SIZES[Kind[dtype]]
    blocks = min(rows.shape[1] // size, max(1, 4096 // items))
    try:
        with np.errstate(all="ignore"):
            return dequantised(np.ascontiguousarray(rows[:, : blocks * size]), Kind[dtype])
    except NotImplementedError:  # a type that the gguf package only names
        return np.zeros((0, blocks * items), np.float32)


def as_floats(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of numbers as float32."""
    if dtype == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return rows.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def _add_floats(found: TensorStatistics, piece: np.ndarray) -> np.ndarray:
    """The rows with numbers that are not finite."""
    integers, infinite = _FLOATS[found.part.dtype]
    numbers = piece.view(integers)
    magnitude = numbers & integers(infinite | (infinite & -infinite) - 1)  # without the sign
    found.numbers += numbers.size
    top = magnitude.max(axis=1)
    bad = top >= infinite
    if bad.any():
        found.bad += int((magnitude[bad] >= infinite).sum())
    if found.part.dtype == "F16" and (top >= 0x7BFF).any():
        found.at_end += int((magnitude == 0x7BFF).sum())
    if found.rows:
        columns = slice(None, None, max(1, numbers.shape[1] // 8))
        maybe = np.flatnonzero((numbers[:, columns] == numbers[:, :1]).all(1))
        same = maybe[(numbers[maybe] == numbers[maybe, :1]).all(1)] if numbers.shape[1] > 1 else maybe[:0]
        empty = int((top[same] == 0).sum())
        found.empty += empty + int((top == 0).sum() if numbers.shape[1] == 1 else 0)
        found.still += len(same) - empty
    return bad


def _add_blocks(found: TensorStatistics, piece: np.ndarray) -> np.ndarray:
    """The rows with scales that are not finite, or lost."""
    dtype = found.part.dtype
    size = GGML_QUANT_SIZES[Kind[dtype]][1]
    blocks = piece.reshape(len(piece), -1, size)
    found.numbers += blocks.shape[0] * blocks.shape[1]
    halves = blocks.view(np.uint16) if size % 2 == 0 else None
    bad, zero = np.zeros(blocks.shape[:2], bool), np.ones(blocks.shape[:2], bool)
    for place in _SCALES[dtype]:
        scale = (
            halves[..., place // 2]
            if halves is not None
            else blocks[..., place : place + 2].copy().view(np.uint16)[..., 0]
        )
        magnitude = scale & np.uint16(0x7FFF)
        bad |= magnitude >= 0x7C00
        zero &= magnitude == 0
    if zero.any():
        places = np.argwhere(zero)
        some = blocks[zero]
        ordered = np.sort(some, axis=1)
        varied = (np.diff(ordered, axis=1) > 0).sum(1) + 1 > _VARIED
        zero[tuple(places[~varied].T)] = False
        found.lost += int(varied.sum())
        empty = (~varied).reshape(-1)
        whole = np.bincount(places[empty, 0], minlength=len(piece)) == blocks.shape[1]
        found.empty += int(whole.sum())
    found.bad += int(bad.sum())
    second = min(1, blocks.shape[1] - 1)  # rows of one value repeat their first block
    maybe = np.flatnonzero((blocks[:, :1] == blocks[:, [second, -1]]).all((1, 2)))
    if len(maybe):
        numbers = _numbers_of(piece[maybe], dtype)
        with np.errstate(invalid="ignore"):
            still = (blocks[maybe] == blocks[maybe, :1]).all((1, 2)) & (np.ptp(numbers, axis=1) == 0)
            found.still += int((still & (numbers[:, 0] != 0)).sum())
    return np.asarray((bad | zero).any(1))
