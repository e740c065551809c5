"""The size of a model: the bytes of its files, and bits a weight of what is loaded from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_tiny, make_tokenizer, write_gguf

from lyapunov_prune.models.size import model_size, stored_size, told_bytes


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("bfloat16", 16)])
def test_a_plain_folder_has_the_bits_of_its_dtype(dtype: str, bits: int, tmp_path: Path) -> None:
    import torch

    model = make_tiny("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    size = stored_size(tmp_path)
    assert size is not None
    assert size.weights == model.num_parameters()
    assert size.bytes == (tmp_path / "model.safetensors").stat().st_size
    assert model_size(model).bits == bits
    assert bits < size.bits < 1.2 * bits  # its header


def test_what_has_no_files_is_as_large_as_it_would_be_saved() -> None:
    model = make_tiny("llama")
    assert stored_size("nowhere/at-all") is None
    assert stored_size("nowhere/at-all", model) == model_size(model)


def test_a_gguf_file_counts_its_numbers(reader: object, tmp_path: Path) -> None:
    write_gguf(reader, tmp_path / "x.gguf")  # type: ignore[arg-type]
    size = stored_size(tmp_path / "x.gguf")
    assert size is not None
    assert size.bytes == (tmp_path / "x.gguf").stat().st_size
    assert size.weights == reader.num_parameters()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("size", "told"), [(12, "12 B"), (1_500, "1.5 KB"), (173_000_000, "173.0 MB"), (1_360_000_000, "1.36 GB")]
)
def test_bytes_in_words(size: int, told: str) -> None:
    assert told_bytes(size) == told
