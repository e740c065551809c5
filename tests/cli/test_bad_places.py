"""A bad output, a full disk and a full GPU are one line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import COMMANDS, TEXT, Done

from lyapunov_prune.models import loading

# Bad places, and disks.


@pytest.mark.parametrize("output", ["tiny", "tiny/config.json"], ids=["folder", "file"])
def test_an_output_that_is_not_empty(output: str, run_bad: Callable[..., str]) -> None:
    line = run_bad("prune", "tiny", "--remove", "1", "-o", output, *TEXT)
    told = {"tiny": "exists and is not empty"}
    assert f"{output} {told.get(output, 'is a file')}" in line


@pytest.mark.parametrize("name", ["profile", "rank", "eval"])
def test_an_output_that_is_a_file(name: str, run_bad: Callable[..., str]) -> None:
    assert "write in tiny/config.json" in run_bad(*COMMANDS[name], "-o", "tiny/config.json")


@pytest.mark.parametrize(
    "command",
    [
        ("heal", "tiny", "--teacher", "tiny"),
        ("joint", "tiny", "--remove", "1"),
    ],
    ids=lambda command: command[0],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command: tuple[str, ...], run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished work is kept under runs/ here, wherever the output is."""
    shutil.rmtree("tiny")
    access, here = os.access, Path.cwd()
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place).absolute() != here and access(place, mode))
    told = run_bad(*command, "-o", str(here.parent / "elsewhere/out"), *TEXT)
    assert "is not yours to write; run it from a folder that you may write" in told


def test_a_full_disk(command: list[str], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    done = run(*command)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "No space left on device" in done.err
    assert not any(Path(path).is_file() for path in done.changed)


@pytest.mark.parametrize("folder", ["tiny", "absent", "tiny/config.json"])
def test_a_report_of_nothing(folder: str, run_bad: Callable[..., str]) -> None:
    assert f"{folder} {'is not there' if folder == 'absent' else 'holds no result'}" in run_bad("report", folder)


def test_a_full_gpu_is_one_line(run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines.")

    monkeypatch.setattr(loading, "load", load)
    line = run_bad(*COMMANDS["profile"])
    assert line == "error: CUDA out of memory; lower --context, or give --device cpu\n"
