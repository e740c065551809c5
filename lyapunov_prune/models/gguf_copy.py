"""Write a GGUF file from the bytes of another: kept tensors are copied unchanged, whatever their quantisation."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lyapunov_prune.errors import reported
from lyapunov_prune.models.gguf_header import MAGIC, STRING, VERSION, Header, Tensor, Value, text
from lyapunov_prune.models.weight_files import read_parts


@dataclass(frozen=True)
class Anew:
    """New numbers for a tensor: its quantisation type, as GGUF numbers it, and its bytes."""

    kind: int
    data: bytes


@dataclass(frozen=True)
class Piece:
    """A tensor to write: its name, the tensor that it takes shape and bytes from, and new bytes if it has any."""

    name: str
    source: Tensor
    anew: Anew | None = None

    @property
    def kind(self) -> int:
        return self.source.kind if self.anew is None else self.anew.kind

    @property
    def size(self) -> int:
        return self.source.size if self.anew is None else len(self.anew.data)


def pieces_of(header: Header, kept: Sequence[int], anew: Mapping[str, Anew]) -> list[Piece]:
    """The tensors for a file with the layers `kept`, renumbered; `anew` is keyed by the new names."""
    number = {old: new for new, old in enumerate(kept)}
    stays = [t for t in header.tensors if t.layer is None or t.layer in number]
    named = [(t.name if t.layer is None else t.named_in(number[t.layer]), t) for t in stays]
    return [Piece(name, tensor, anew.get(name)) for name, tensor in named]


def write_pieces(path: Path, values: Mapping[str, Value], pieces: Sequence[Piece], alignment: int) -> dict[str, int]:
    """Write a GGUF file and return the offset of each header value. Needs memory for the header and one buffer.

    Raises LyapunovPruneError if a source file ends too early.
    """
    head, places = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(pieces), len(values))), {}
    for key, value in values.items():
        head += text(key).raw + struct.pack("<I", value.kind)
        places[key] = len(head)
        head += value.raw
    offset = 0
    for piece in pieces:
        dims = piece.source.dims
        head += text(piece.name).raw + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, piece.kind, offset)
        offset += piece.size + -piece.size % alignment
    head += bytes(-len(head) % alignment)
    with path.open("xb") as out:
        out.write(head)
        for piece in pieces:
            for part in bytes_of(piece):
                out.write(part)
            out.write(bytes(-piece.size % alignment))
    return places


def bytes_of(piece: Piece) -> Iterator[memoryview]:
    """The bytes of a piece, in parts that reuse one buffer."""
    source = piece.source
    if piece.anew is not None:
        yield memoryview(piece.anew.data)
        return
    with reported(f"cannot read {source.name} in {source.file}", "fetch it again"):
        yield from read_parts(source.file, source.start, source.size)


def whole(piece: Piece) -> bytearray:
    """The bytes of a piece together."""
    made, start = bytearray(piece.size), 0
    for part in bytes_of(piece):  # not by join, which would hold all parts before it copies the first
        made[start : start + len(part)] = part
        start += len(part)
    return made


def rewrite_text(path: Path, place: int, old: Value, new: str) -> None:
    """Overwrite the text `old` in place with `new`, which must not be longer, padded with spaces."""
    assert old.kind == STRING
    room, encoded = len(old.raw) - 8, new.encode("utf-8", "replace")
    if len(encoded) > room:
        raise ValueError(f"{len(encoded)} bytes do not fit into {room}")
    with path.open("r+b") as file:
        file.seek(place + 8)
        file.write(encoded.ljust(room))


def same_bytes(piece: Piece, written: Tensor) -> bool:
    """Whether `written` holds the bytes of `piece`, copied or new."""
    if (written.kind, written.dims, written.size) != (piece.kind, piece.source.dims, piece.size):
        return False
    if piece.anew is not None:
        return whole(Piece(written.name, written)) == piece.anew.data
    pairs = zip(read_parts(written.file, written.start, written.size), bytes_of(piece), strict=True)
    return all(now.tobytes() == was.tobytes() for now, was in pairs)
