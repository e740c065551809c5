"""Tensors copied from file to file are those that safetensors reads back, whole or block by block."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lyapunov_prune.checkpoints import tensor_files
from lyapunov_prune.checkpoints.tensor_files import (
    DTYPES,
    TensorPiece,
    read_header,
    read_into,
    read_tensors,
    reading,
    write_tensors,
)
from lyapunov_prune.errors import LyapunovPruneError

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
    pieces = {f"new.{name}": TensorPiece(stored) for name, stored in read_tensors(source).items()}
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
    write_tensors(tmp_path, {"wide": TensorPiece(read_tensors(source)["wide"], axis, total, kept)}, 10**9)
    blocks = TENSORS["wide"].chunk(total, dim=axis)
    assert torch.equal(read(tmp_path)["wide"], torch.cat([blocks[i] for i in kept], dim=axis))


def test_the_header_holds_every_size(source: Path) -> None:
    header = read_header(source / "model.safetensors")
    assert {name: stored.size for name, stored in header.items()} == {name: t.nbytes for name, t in TENSORS.items()}


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: os.truncate(file, 99), os.utime])
def test_a_file_that_changed_is_not_copied(change: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    pieces = {name: TensorPiece(stored) for name, stored in read_tensors(source).items()}
    pieces["wide"] = TensorPiece(pieces["wide"].stored, 0, 4, (1,))
    change(source / "model.safetensors")
    for name in ("half", "wide"):
        with pytest.raises(LyapunovPruneError, match="no longer be read"):
            write_tensors(tmp_path, {name: pieces[name]}, 10**9)


def test_a_target_that_is_full_is_no_fault_of_the_source(source: Path) -> None:
    pieces = {name: TensorPiece(stored) for name, stored in read_tensors(source).items()}
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb", buffering=0) as full:
        full.writelines(tensor_files.parts_of(pieces["wide"]))


def test_a_tensor_is_read_into_memory(source: Path) -> None:
    for name, stored in read_tensors(source).items():
        memory = torch.full(TENSORS[name].shape, 9, dtype=TENSORS[name].dtype)
        read_into(memory, stored)
        assert torch.equal(memory, TENSORS[name])
        assert DTYPES.get(stored.dtype, memory.dtype) == memory.dtype


def test_a_file_that_changes_while_it_is_read_is_seen(source: Path) -> None:
    tensors, file = read_tensors(source), source / "model.safetensors"
    memory = torch.zeros(4, 6, 2, dtype=torch.float64)
    with reading([tensors["wide"]]):
        read_into(memory, tensors["wide"])
    changed = pytest.raises(LyapunovPruneError, match=r"no longer be read: .*model\.safetensors")
    with changed, reading(tensors.values()):
        save_file({**TENSORS, "wide": TENSORS["wide"] + 1}, file, {"format": "pt"})
    with changed, reading(tensors.values()):
        pytest.fail("it is another file")
    tensors = read_tensors(source)
    os.truncate(file, tensors["wide"].start + 8)
    with pytest.raises(OSError, match="became shorter"):
        read_into(memory, tensors["wide"])


@pytest.mark.parametrize("content", [b"", b"\xff" * 99, (5).to_bytes(8, "little") + b"hello"])
def test_a_file_without_a_header_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(OSError, match="header of tensors"):
        read_header(tmp_path / "model.safetensors")
