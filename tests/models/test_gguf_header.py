"""The header of a GGUF file is read as the gguf package reads it, and strange bytes are refused in a line."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from helpers import write_gguf
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.gguf_header import Value, array, number, read_header, text

NUMBERS = {
    GGUFValueType.UINT8: 200,
    GGUFValueType.INT8: -3,
    GGUFValueType.UINT16: 60000,
    GGUFValueType.INT16: -300,
    GGUFValueType.UINT32: 4 * 10**9,
    GGUFValueType.INT32: -70000,
    GGUFValueType.FLOAT32: 0.5,
    GGUFValueType.BOOL: True,
    GGUFValueType.UINT64: 2**63,
    GGUFValueType.INT64: -(2**60),
    GGUFValueType.FLOAT64: 0.1,
}


def test_every_type_is_read_and_made(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    for kind, value in NUMBERS.items():
        writer.add_key_value(f"a.{kind.name}", value, kind)
    writer.add_array("a.texts", ["ä", "", "c"])
    writer.add_array("a.counts", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "x.gguf")
    for kind, value in NUMBERS.items():
        assert header.read(f"a.{kind.name}") == value
        assert header.values[f"a.{kind.name}"] == number(value, kind)
    assert header.read("a.texts") == ["ä", "", "c"]
    assert header.values["a.texts"].picked((0, 2)).read() == ["ä", "c"]
    assert header.values["a.counts"].picked((0, 2)) == array(GGUFValueType.INT32, [1, 3])
    assert header.values["general.architecture"] == text("llama")
    assert (Value(8, text("ä").raw).read(), header.read("absent")) == ("ä", None)


def test_every_tensor_is_where_the_gguf_package_finds_it(reader: PreTrainedModel, tmp_path: Path) -> None:
    file = write_gguf(reader, tmp_path / "x.gguf", packed=True)
    found = [(t.name, t.dims, t.kind, t.start, t.size) for t in read_header(file).tensors]
    wanted = [
        (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in GGUFReader(file).tensors
    ]
    assert found == wanted


def test_no_bytes_make_it_fail_otherwise(reader: PreTrainedModel, tmp_path: Path) -> None:
    content = write_gguf(reader, tmp_path / "x.gguf").read_bytes()
    draw, broken = random.Random(0), tmp_path / "y.gguf"
    for _ in range(300):
        made = bytearray(content[: draw.randrange(len(content))] if draw.random() < 0.3 else content)
        for _ in range(draw.randrange(1, 4)):
            if made:
                made[draw.randrange(min(len(made), 4000))] = draw.randrange(256)
        broken.write_bytes(made)
        with suppress(LyapunovPruneError):
            _ = read_header(broken).layers


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x00\x00\x00\x03" + bytes(100), b"no model " * 100])
def test_what_is_no_such_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(LyapunovPruneError, match="truncated or not a GGUF file"):
        read_header(tmp_path / "x.gguf")
