"""Devices: which a name stands for."""

from __future__ import annotations

import pytest
import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import device as device_module
from lyapunov_prune.models.device import free_memory, resolve_device


@pytest.mark.parametrize(
    ("cuda", "mps", "rank", "wanted"),
    [
        (True, True, None, "cuda"),
        (True, False, "2", "cuda:2"),
        (False, True, None, "mps"),
        (False, False, None, "cpu"),
        (False, False, "2", "cpu"),
    ],
)
def test_auto_is_the_gpu_if_there_is_one(
    cuda: bool, mps: bool, rank: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(device_module, "_usable", lambda name: True)
    if rank is not None:  # a process of accelerate launch
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert resolve_device("auto") == wanted
    assert resolve_device("cuda") == ("cuda" if rank is None else f"cuda:{rank}")
    assert resolve_device("cuda:1") == "cuda:1"


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "_usable", lambda name: False)
    for name, told in (("cuda", "no CUDA device here; give cpu, "), ("cuda:1", "no device cuda:1 here; give cpu, ")):
        with pytest.raises(LyapunovPruneError, match=told):
            resolve_device(name)


def test_what_torch_keeps_unused_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    on = {"cuda:1": {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 20}}
    for name in on["cuda:1"]:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: on[device][name])
    assert free_memory("cuda:1") == 150
    assert free_memory("cpu") > 150
