"""The header of a GGUF file: its keys as bytes, and the place of every tensor. Tensors are not read.

The reader of the gguf package makes an array per token: 30 s and 0.7 GB for a vocabulary of 262,144 tokens.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.models.weight_files import require_every_layer
from lyapunov_prune.results.files import require_file

MAGIC, VERSION = b"GGUF", 3
_VERSIONS = (2, 3)
STRING, ARRAY, UINT32, INT32, FLOAT32, BOOL = 8, 9, 4, 5, 6, 7
# Format codes of `struct`, keyed by GGUF's type numbers.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
SPLIT = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class Value:
    """A header value: the number of its type, and its bytes as in the file."""

    kind: int
    raw: bytes

    @property
    def length(self) -> int | None:
        """Number of items of an array; None for other values."""
        return int(struct.unpack_from("<Q", self.raw, 4)[0]) if self.kind == ARRAY else None

    def read(self) -> Any:
        """The number, the text, or the list of items of an array."""
        if self.kind == STRING:
            return self.raw[8:].decode("utf-8", "replace")
        if self.kind != ARRAY:
            return struct.unpack(f"<{_SCALARS[self.kind]}", self.raw)[0]
        item, count = struct.unpack_from("<IQ", self.raw)
        if item != STRING:
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self.raw, 12))
        texts, at = [], 12
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self.raw, at)
            texts.append(self.raw[at + 8 : at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        return texts

    def picked(self, kept: Iterable[int]) -> Value:
        """The array reduced to the items with these indices."""
        (item,), items = struct.unpack_from("<I", self.raw), self.read()
        return array(item, [items[i] for i in kept])


def number(value: float, kind: int = UINT32) -> Value:
    return Value(kind, struct.pack(f"<{_SCALARS[kind]}", value))


def text(value: str) -> Value:
    encoded = value.encode("utf-8", "replace")
    return Value(STRING, struct.pack("<Q", len(encoded)) + encoded)


def array(item: int, items: list[Any]) -> Value:
    head = struct.pack("<IQ", item, len(items))
    if item == STRING:
        return Value(ARRAY, head + b"".join(text(each).raw for each in items))
    return Value(ARRAY, head + struct.pack(f"<{len(items)}{_SCALARS[item]}", *items))


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: `dims` in GGUF's order (fastest first), and `size` bytes from offset `start`.

    For an unknown quantisation, `size` reaches to the next tensor.
    """

    name: str
    dims: tuple[int, ...]
    kind: int
    file: Path
    start: int
    size: int

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to; None outside the layers."""
        found = _BLOCK.fullmatch(self.name)
        return int(found[1]) if found else None

    def named_in(self, layer: int) -> str:
        """Its name in the layer with this number."""
        found = _BLOCK.fullmatch(self.name)
        assert found is not None
        return f"blk.{layer}.{found[2]}"

    @property
    def quantisation(self) -> str:
        try:
            return GGMLQuantizationType(self.kind).name
        except ValueError:
            return f"type {self.kind}"


@dataclass(frozen=True, eq=False)
class Header:
    """Everything before the tensors of a GGUF file, or of all `parts` of a split one."""

    path: Path
    parts: tuple[Path, ...]
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    alignment: int

    def read(self, key: str) -> Any:
        """The value of `key`; None if it is missing."""
        return self.values[key].read() if key in self.values else None

    @property
    def architecture(self) -> str:
        return str(self.read("general.architecture"))

    @cached_property
    def layers(self) -> int:
        """Number of layers. Raises LyapunovPruneError unless the tensors cover exactly that many."""
        told = self.read(f"{self.architecture}.block_count")
        found = {tensor.layer for tensor in self.tensors} - {None}
        require_every_layer(self.path, told, found)
        return int(told)


def read_header(path: Path, *, whole: bool = True) -> Header:
    """Read the header of the GGUF file `path`, or of all parts if it is split.

    Raises LyapunovPruneError for a file that cannot be read, is not GGUF, is truncated, or lacks a part. If not
    `whole`, tensors may lie beyond the end of the file.
    """
    first = _read_one(path, whole)
    count = first.read("split.count") or 1
    if count == 1:
        return first
    named = _PART.fullmatch(path.name)
    stem = named[1] if named and int(named[3]) == count else path.stem
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise LyapunovPruneError(f"{path} is one of {count} parts and {missing[0]} is not beside it; fetch it")
    headers = [first if part == path else _read_one(part, whole) for part in parts]
    values = {key: value for key, value in headers[0].values.items() if key not in SPLIT}
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    _require_distinct(path, [tensor.name for tensor in tensors])
    return Header(path, tuple(parts), values, tensors, headers[0].alignment)


def _read_one(path: Path, whole: bool) -> Header:
    require_file(path)
    with reported(f"cannot read {path}", "check the path and its permissions"):
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parsed(path, data, whole)
        except (ValueError, KeyError, struct.error, OverflowError):  # mmap raises ValueError for an empty file
            raise LyapunovPruneError(
                f"{path} is truncated or not a GGUF file; lyapunov-prune check {path} lists what is wrong"
            ) from None


def _require(sound: bool) -> None:
    if not sound:
        raise ValueError


def _parsed(path: Path, data: mmap.mmap, whole: bool) -> Header:
    version, count, keys = struct.unpack_from("<IQQ", data, 4)
    _require(data[:4] == MAGIC and version in _VERSIONS)
    at, values = 24, {}
    for _ in range(keys):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        end = _end(data, at + 4, kind)
        _require(end <= len(data) and key not in values)
        values[key] = Value(kind, data[at + 4 : end])
        at = end
    found = []
    for _ in range(count):
        name, at = _string(data, at)
        (rank,) = struct.unpack_from("<I", data, at)
        *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, at + 4)
        at += 4 + 8 * rank + 12
        found.append((name, dims, kind, offset))
    alignment = values["general.alignment"].read() if "general.alignment" in values else GGUF_DEFAULT_ALIGNMENT
    start = -(-at // alignment) * alignment
    offsets = sorted({offset for *_, offset in found})
    following = dict(zip(offsets, [*offsets[1:], len(data) - start], strict=False))
    tensors = []
    for name, dims, kind, offset in found:
        room = following[offset] - offset
        size = _size(kind, dims)
        if size is None:
            size = room
        _require(0 <= size <= room or not whole)
        tensors.append(Tensor(name, tuple(dims), kind, path, start + offset, size))
    _require_distinct(path, [tensor.name for tensor in tensors])
    return Header(path, (path,), values, tuple(tensors), alignment)


def _require_distinct(path: Path, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise LyapunovPruneError(f"{path} holds two tensors with the same name; convert the original checkpoint again")


def _size(kind: int, dims: Sequence[int]) -> int | None:
    try:
        items, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return None
    return prod(dims) // items * size


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    end = _end(data, at, STRING)
    _require(end <= len(data))
    return data[at + 8 : end].decode("utf-8"), end


def _end(data: mmap.mmap, at: int, kind: int) -> int:
    """The offset just after the value of type `kind` that starts at `at`."""
    if kind == STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != ARRAY:
        return at + struct.calcsize(f"<{_SCALARS[kind]}")
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item != STRING:
        return at + count * struct.calcsize(f"<{_SCALARS[item]}")  # an array of arrays raises KeyError
    length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        at += 8 + length(data, at)[0]
    return at
