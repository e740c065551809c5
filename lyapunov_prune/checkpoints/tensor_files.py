"""The safetensors format as bytes: where each tensor of a checkpoint lies, and new files made of those ranges.

A file consists of the length of the header (8 bytes, little-endian), the header in JSON, and the bytes of the tensors
without gaps. Ranges are copied undecoded, so the output is bit for bit the input, and memory holds one buffer whatever
the size of a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from lyapunov_prune.errors import reported
from lyapunov_prune.models.weight_files import BUFFER, INDEX, SINGLE, fill, read_parts, weight_files
from lyapunov_prune.progress import track

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """The place of the tensor `key`: `size` bytes from `start` of `file`. `state` is the file's, to detect changes."""

    key: str
    file: Path
    state: tuple[int, ...]
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorPiece:
    """The part of a tensor to write: all of it, or the blocks `kept` out of `total` along `axis`."""

    stored: StoredTensor
    axis: int = 0
    total: int = 1
    kept: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        return self.stored.size // self.total * len(self.kept)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.total == 1:
            return self.stored.shape
        shape = list(self.stored.shape)
        shape[self.axis] = shape[self.axis] // self.total * len(self.kept)
        return tuple(shape)


@dataclass(frozen=True)
class Joined:
    """Pieces of one tensor, one after the other along its first axis; each has no first axis if they are `stacked`."""

    pieces: tuple[TensorPiece, ...]
    stacked: bool

    @property
    def stored(self) -> StoredTensor:
        return self.pieces[0].stored

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = self.pieces[0].shape
        if self.stacked:
            return (len(self.pieces), first, *rest)
        return (sum(piece.shape[0] for piece in self.pieces), *rest)


Part = TensorPiece | Joined


def read_tensors(folder: Path, named: str | None = None) -> dict[str, StoredTensor]:
    """Every tensor that transformers finds in `folder`, by name; `named` is as in `weight_files`."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder, named):
        tensors |= read_header(file)
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor in the file `path`, by name; raises OSError if it has no valid header."""
    with path.open("rb") as file:
        state = _state(os.fstat(file.fileno()))
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length))
        except (ValueError, OverflowError, MemoryError):
            raise OSError(f"{path} has no header of tensors") from None
    header.pop("__metadata__", None)
    return {
        key: StoredTensor(key, path, state, 8 + length + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
        for key, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def _state(status: os.stat_result) -> tuple[int, ...]:
    """Inode, size and time of a file, which change when it is replaced or overwritten."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def reading(tensors: Iterable[StoredTensor]) -> Iterator[None]:
    """Check, at the start and end of the block, that the files of `tensors` have not changed since.

    Raises LyapunovPruneError if a file is missing, cannot be read, or has changed.
    """
    files = {stored.file: stored.state for stored in tensors}
    what = "a file of the checkpoint can no longer be read"
    with reported(what, "leave it there while it is needed", OSError, SafetensorError):
        _require_unchanged(files)
        yield
        _require_unchanged(files)


def _require_unchanged(files: Mapping[Path, tuple[int, ...]]) -> None:
    for file, state in files.items():
        if _state(file.stat()) != state:
            raise OSError(f"{file} is not what it was")


def read_into(memory: torch.Tensor, stored: StoredTensor) -> None:
    """Fill `memory`, contiguous and on the CPU, with the bytes of the tensor; faster than a memory map.

    Raises OSError if the file is too short.
    """
    numbers: Any = memory.view(-1).view(torch.uint8).numpy()
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.start)
        fill(memoryview(numbers), file)


def write_tensors(folder: Path, pieces: Mapping[str, Part], shard_bytes: int) -> None:
    """Write `pieces` to files of at most `shard_bytes` each (a larger tensor gets its own), with an index if several.

    Raises LyapunovPruneError if a file can no longer be read.
    """
    shards = _split(pieces, shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, track(shards, "copying", lambda s: sum(p.size for p in s.values())), strict=True):
        _write_file(folder / name, shard)
    if count > 1:
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        write_index(folder, where, sum(piece.size for piece in pieces.values()))


def write_index(folder: Path, where: Mapping[str, str], size: int) -> None:
    """Write the index of a checkpoint of several files: `where` maps tensors to files, `size` is the total in bytes."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(pieces: Mapping[str, Part], limit: int) -> list[dict[str, Part]]:
    shards: list[dict[str, Part]] = [{}]
    room = limit
    for name, piece in pieces.items():
        if shards[-1] and piece.size > room:
            shards.append({})
            room = limit
        shards[-1][name] = piece
        room -= piece.size
    return shards


def _write_file(path: Path, pieces: Mapping[str, Part]) -> None:
    # Widest elements first, so that every tensor is aligned to its element size.
    ordered = sorted(pieces.items(), key=lambda item: -_width(item[1]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, piece in ordered:
        header[name] = {"dtype": piece.stored.dtype, "shape": piece.shape, "data_offsets": [end, end + piece.size]}
        end += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for _, piece in ordered:
            for part in parts_of(piece):
                target.write(part)


def _width(piece: Part) -> int:
    elements = int(np.prod(piece.shape, dtype=np.int64))
    return piece.size // elements if elements else 0


def parts_of(piece: Part) -> Iterator[Any]:
    """The bytes of `piece`, in parts that reuse one buffer."""
    if isinstance(piece, Joined):
        for each in piece.pieces:
            yield from parts_of(each)
        return
    with reading([piece.stored]):
        stored = piece.stored
        yield from _blocks(piece) if piece.total > 1 else read_parts(stored.file, stored.start, stored.size)


def _blocks(piece: TensorPiece) -> Iterator[Any]:
    stored = piece.stored
    outer = int(np.prod(stored.shape[: piece.axis], dtype=np.int64))
    inner = stored.size // (outer * piece.total)
    data = np.memmap(stored.file, np.uint8, "r", stored.start, (outer, piece.total, inner))
    rows, blocks = (max(1, BUFFER // size) for size in (piece.total * inner, inner))
    for start in range(0, outer, rows):
        # If a row does not fit into the buffer, there is one, and its blocks are taken a few at a time.
        for first in range(0, len(piece.kept), blocks):
            yield data[start : start + rows, list(piece.kept[first : first + blocks])].reshape(-1)
