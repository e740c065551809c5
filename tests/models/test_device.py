"""Devices and processes: which device a name stands for, and that processes part before the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import free_port

from lyapunov_prune.models import device as device_module
from lyapunov_prune.models.device import free_memory, processes, resolve_device


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


def test_what_torch_keeps_unused_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    on = {"cuda:1": {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 20}}
    for name in on["cuda:1"]:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: on[device][name])
    assert free_memory("cuda:1") == 150
    assert free_memory("cpu") > 150


def test_a_process_by_itself_joins_nothing() -> None:
    assert processes(on_cpu=True).num_processes == 1
    assert not torch.distributed.is_initialized()


def test_a_torch_without_processes_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    assert processes(on_cpu=True).num_processes == 1


SCRIPT = """
import atexit, sys, torch
atexit.register(lambda: print(torch.distributed.is_initialized()))  # the last of what runs at exit
if sys.argv[1] == "theirs":
    torch.distributed.init_process_group("gloo")
from lyapunov_prune.models.device import processes
processes(on_cpu=True), processes(on_cpu=True)
print(torch.distributed.is_initialized())
"""


@pytest.mark.parametrize(("whose", "left"), [("ours", "False"), ("theirs", "True")])
def test_processes_that_were_joined_here_part_before_the_interpreter_ends(whose: str, left: str) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, whose], env={**os.environ, **alone, **place}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", left], done.stderr
