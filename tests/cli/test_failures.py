"""How a command ends that failed: one line and an exit code, whatever was raised."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import QUICK, TEXT, Done

from lyapunov_prune.cli import inputs, terminal
from lyapunov_prune.cli.failures import as_refusal


@pytest.fixture(autouse=True)
def traces(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


class Panic(BaseException):
    """As of the tokenizers library."""


@pytest.mark.parametrize(
    "error", [ValueError("of no\nkind"), RecursionError("of no kind"), RuntimeError("of no kind"), Panic("of no kind")]
)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_what_nobody_foresaw_is_one_line_with_its_trace(
    error: BaseException, more: list[str], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, traces: Path
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("lyapunov_prune.cli.commands.measure.load_inputs", fail)
    done = run("profile", "tiny", *QUICK, *more)
    (trace,) = traces.iterdir()
    assert (done.code, done.out, done.changed) == (3, "", set())
    assert done.err.count("\n") == 1
    told = (
        f"error: profile tiny {' '.join([*QUICK, *more])}: {type(error).__name__} in profile (cli/commands/measure.py:"
    )
    assert done.err.startswith(told)
    assert f"of no kind; please report it with {trace}" in done.err
    assert "Traceback (most recent call last)" in trace.read_text()
    assert trace.stat().st_mode & 0o077 == 0


def test_a_trace_that_cannot_be_saved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    refusal = as_refusal(caught(ValueError("of no kind")), ["eval", "x" * 5000])
    assert "its trace could not be saved (No such file or directory)" in str(refusal)
    assert len(str(refusal)) < 1000


@pytest.mark.parametrize("code", [errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOSPC])
def test_a_path_is_the_users_to_mend(code: int) -> None:
    refusal = as_refusal(caught(OSError(code, os.strerror(code), "given")), [])
    assert (refusal.exit_code, str(refusal)) == (
        2,
        f"given: {os.strerror(code)}; give another path, or make room there",
    )


def test_a_full_memory_is_the_users_to_mend() -> None:
    assert as_refusal(caught(MemoryError()), []).exit_code == 2


def caught(error: Exception) -> Exception:
    """Raised within the package."""

    class Raising:
        def split(self, *args: object) -> list[str]:
            raise error

    try:
        inputs.require_studies(Raising())  # type: ignore[arg-type]
    except type(error) as raised:
        return raised
    raise AssertionError


# stdout.


def test_letters_that_stdout_lacks_are_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding="latin-1"))
    terminal.speak_any_language()
    terminal.say("ρ of a layer")
    assert bytes_.getvalue() == b"\\u03c1 of a layer\n"


@pytest.mark.parametrize("closed", ["pipe", "full"])
def test_a_stdout_that_takes_nothing_is_one_line(closed: str, checkpoint: Path) -> None:
    if closed == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    command = [sys.executable, "-m", "lyapunov_prune.cli", "eval", "tiny", *TEXT, "-o", "run"]
    done = subprocess.run(command, cwd=checkpoint.parent, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    os.close(out)
    assert done.returncode == 3
    assert done.stderr.startswith("error: cannot print on stdout: ")
    assert done.stderr.count("\n") == 1
    assert json.loads((checkpoint.parent / "run" / "eval.json").read_text())["kind"] == "Evaluation"


def test_a_rank_without_other_processes_silences_nothing(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert "perplexity" in run("eval", "tiny", *TEXT).out
