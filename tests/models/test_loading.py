"""What a name, a dtype and a device stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.folder import loading_errors
from lyapunov_prune.models.loading import load


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", "with space", "~/absent", "a..b", "-a/b"])
def test_an_unknown_model_is_refused(name: str) -> None:
    with pytest.raises(LyapunovPruneError, match=f"no model at {name}"):
        load(name)


def test_a_file_that_is_no_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"no model at .*give a folder"):
        load(checkpoint / "config.json")


@pytest.mark.parametrize("dtype", ["float99", "int8", "nn", "float8_e4m3fn", ""])
def test_an_unknown_dtype_is_refused(dtype: str, checkpoint: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=f"unknown dtype {dtype}"):
        load(checkpoint, dtype=dtype)


@pytest.mark.parametrize("device", ["bogus", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_refused(device: str, checkpoint: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=f"no device {device} "):
        load(checkpoint, device=device)


def test_a_model_on_one_device_is_whole_and_not_dispatched(checkpoint: Path, reader: PreTrainedModel) -> None:
    model = load(checkpoint, device="auto").model
    assert model.num_parameters() == reader.num_parameters()
    assert not hasattr(model, "hf_device_map")


def test_a_gpu_that_is_full_is_no_corrupt_file() -> None:
    with pytest.raises(torch.OutOfMemoryError), loading_errors("x"):
        raise torch.OutOfMemoryError("CUDA out of memory")
