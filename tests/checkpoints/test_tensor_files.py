"""Tensors copied from file to file are those that safetensors reads back, whole or block by block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lyapunov_prune.checkpoints import tensor_files
from lyapunov_prune.checkpoints.tensor_files import DTYPES, Piece, read_header, read_into, read_tensors, write_tensors

TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5).bfloat16(),
    "wide": torch.randn(4, 6, 2, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "number": torch.tensor(3.0),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", {"format": "pt"})
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [10**9, 100, 1])
def test_what_is_written_is_what_was_read(source: Path, shard_bytes: int, tmp_path: Path) -> None:
    pieces = {f"new.{name}": Piece(stored) for name, stored in read_tensors(source).items()}
    write_tensors(tmp_path, pieces, shard_bytes)
    copied = read(tmp_path)
    assert copied.keys() == {f"new.{name}" for name in TENSORS}
    assert all(torch.equal(copied[f"new.{name}"], tensor) for name, tensor in TENSORS.items())
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes < 1000)
    assert read_tensors(tmp_path).keys() == copied.keys()  # through the index


@pytest.mark.parametrize("buffer", [1, 2**24])
@pytest.mark.parametrize(("axis", "total", "kept"), [(0, 4, (0, 3)), (1, 3, (1,)), (2, 2, (1,))])
def test_blocks_are_those_of_the_axis(
    axis: int,
    total: int,
    kept: tuple[int, ...],
    buffer: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_files, "BUFFER", buffer)
    write_tensors(tmp_path, {"wide": Piece(read_tensors(source)["wide"], axis, total, kept)}, 10**9)
    blocks = TENSORS["wide"].chunk(total, dim=axis)
    assert torch.equal(read(tmp_path)["wide"], torch.cat([blocks[i] for i in kept], dim=axis))


def test_the_header_holds_every_size(source: Path) -> None:
    header = read_header(source / "model.safetensors")
    assert {name: stored.size for name, stored in header.items()} == {name: t.nbytes for name, t in TENSORS.items()}


def test_the_header_of_a_file_is_read_again_when_it_has_changed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, loads = list[str](), json.loads
    monkeypatch.setattr(tensor_files.json, "loads", lambda text: read.append(text) or loads(text))
    file = source / "model.safetensors"
    first = read_header(file)
    assert read_header(file) == first
    assert len(read) == 1
    save_file({"more": torch.zeros(9), **TENSORS}, file, {"format": "pt"})
    assert read_header(file).keys() == {"more", *TENSORS}


def test_a_file_that_became_shorter_is_an_error(source: Path, tmp_path: Path) -> None:
    pieces = {name: Piece(stored) for name, stored in read_tensors(source).items()}
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match="became shorter while it was read"):
        write_tensors(tmp_path, pieces, 10**9)


def test_a_tensor_is_read_into_memory(source: Path) -> None:
    for name, stored in read_tensors(source).items():
        memory = torch.full(TENSORS[name].shape, 9, dtype=TENSORS[name].dtype)
        read_into(memory, stored, name)
        assert torch.equal(memory, TENSORS[name])
        assert DTYPES.get(stored.dtype, memory.dtype) == memory.dtype


def test_a_file_that_is_another_by_now_is_not_read(source: Path) -> None:
    tensors, file = read_tensors(source), source / "model.safetensors"
    memory = torch.zeros(4, 6, 2, dtype=torch.float64)
    save_file({"more": torch.zeros(9), **TENSORS}, file, {"format": "pt"})
    with pytest.raises(OSError, match="is not what it was"):
        read_into(memory, tensors["wide"], "wide")
    whole = file.read_bytes()
    tensors = read_tensors(source)
    file.write_bytes(whole[: tensors["wide"].start + 8])
    with pytest.raises(OSError, match="became shorter"):
        read_into(memory, tensors["wide"], "wide")
