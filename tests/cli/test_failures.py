"""How a command ends that failed: one line and an exit code, whatever was raised."""

from __future__ import annotations

import errno
import io
import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK, TEXT, Done

from lyapunov_prune.cli import inputs, terminal
from lyapunov_prune.cli.failures import as_refusal
from lyapunov_prune.progress import warn


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
@pytest.mark.parametrize("more", [[], ["--epsilon", "0.1"]])
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
    assert f"{trace}" in done.err
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
    assert refusal.exit_code == 2
    assert str(refusal).startswith(f"given: {os.strerror(code)}")


def test_a_full_memory_is_the_users_to_mend() -> None:
    for full in (
        MemoryError(),
        RuntimeError("unable to mmap x: Cannot allocate memory (12)"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ):
        assert as_refusal(caught(full), []).exit_code == 2


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


Command = Callable[..., subprocess.CompletedProcess[str]]
EVAL = ["eval", "tiny", *TEXT, "-o", "run"]


@pytest.fixture
def command(checkpoint: Path) -> Command:
    """Run a command line in a process of its own, in a shell that opens and closes what `redirected` says."""

    def call(arguments: list[str], redirected: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
        line = f"{sys.executable} -m lyapunov_prune.cli {shlex.join(arguments)} {redirected}"
        where = {"cwd": checkpoint.parent} | options
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, **where)

    return call


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_a_full_stdout_is_one_line(command: Command, checkpoint: Path) -> None:
    done = command(EVAL, "> /dev/full")
    *progress, last = done.stderr.splitlines()  # a slow machine is told how far it is
    assert (done.returncode, done.stdout) == (3, "")
    assert last.startswith("error: ")
    assert "stdout: No space left" in last
    assert not any("error" in line for line in progress)
    assert json.loads((checkpoint.parent / "run" / "eval.json").read_text())["kind"] == "Evaluation"


@pytest.mark.parametrize("arguments", [["--help"], ["theorems"]])
def test_a_reader_that_goes_away_is_no_failure(arguments: list[str], command: Command) -> None:
    done = command(arguments, "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["--help"], EVAL])
def test_a_closed_stdout_is_refused_before_anything_is_measured(
    arguments: list[str], command: Command, checkpoint: Path
) -> None:
    assert "stdout is closed" in one_line(command(arguments, ">&-"), 2)
    assert os.listdir(checkpoint.parent) == ["tiny"]


@pytest.mark.parametrize("stderr", ["2> /dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing_changes_no_exit_code(stderr: str, command: Command, checkpoint: Path) -> None:
    done = command(["eval"], stderr)
    assert (done.returncode, done.stdout) == (2, "")
    done = command(["theorems"], stderr)
    assert done.returncode == 0
    assert done.stdout


def test_a_warning_that_cannot_be_shown_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        warn("nobody reads this")
        monkeypatch.undo()
        with suppress(OSError):  # what is left in its buffer
            full.close()


# Where a process runs.


@pytest.mark.parametrize("arguments", [EVAL, ["cache"]])
def test_a_folder_that_is_gone_is_one_line(arguments: list[str], command: Command, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = shlex.join([sys.executable, "-m", "lyapunov_prune.cli", *arguments])
    # An empty entry means the current folder to Python, which ends before main where that folder is gone.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        ["bash", "-c", f"cd gone && rmdir ../gone && {line}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the current folder" in one_line(done, 2)


def test_a_user_without_a_home(
    run: Callable[..., Done], run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*user: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "LYAPUNOV_PRUNE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert "LYAPUNOV_PRUNE_CACHE" in run_bad("cache", "--clear")
    assert run(*EVAL).code == 0  # which needs no cache


@pytest.fixture
def no_rights_left() -> Iterator[None]:
    before = os.umask(0o777)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    "arguments",
    [
        EVAL,
        ["rank", "tiny", *TEXT],
        ["prune", "tiny", "--layers", "1", "-o", "out"],
        ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5", "-o", "out"],
        ["heal", "tiny", "--teacher", "tiny", "-o", "out"],
        ["joint", "tiny", "--remove", "1", "-o", "out"],
        ["demo"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_umask_that_keeps_the_owner_out_is_one_line(
    arguments: list[str], run_bad: Callable[..., str], no_rights_left: None
) -> None:
    assert "the umask is 777" in run_bad(*arguments)


def test_python_without_docstrings_is_one_line(command: Command) -> None:
    optimised = os.environ | {"PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    assert "PYTHONOPTIMIZE=2" in one_line(command(EVAL, env=optimised), 2)


LATIN = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", LATIN],
        ["eval", "tiny", "-o", LATIN],
        ["eval", "tiny", "--text", f"{LATIN}.txt"],
        ["eval", "tiny", "--tasks", f"{LATIN}.jsonl"],
        ["prune", "tiny", "--layers", "1", "-o", LATIN],
        ["prune", "tiny", "--plan", f"{LATIN}.json", "-o", "out"],
        ["rank", f"{LATIN}.json"],
        ["compress", "tiny", "--allocation", f"{LATIN}.json", "-o", "out"],
        ["heal", "tiny", "--teacher", LATIN, "-o", "out"],
        ["hierarchy", "tiny", LATIN],
    ],
)
def test_a_path_of_another_encoding_is_one_line(
    arguments: list[str], checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    shutil.copytree(checkpoint, checkpoint.parent / LATIN)
    told = run_bad(*arguments)
    assert r"caf\udce9" in told
    assert "is not UTF-8" in told


def test_nothing_is_written_below_a_folder_of_another_encoding(
    checkpoint: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint.parent / LATIN).mkdir()
    shutil.copytree(checkpoint, checkpoint.parent / LATIN / "tiny")
    run("cache")  # which goes to the folder of the checkpoint
    monkeypatch.chdir(checkpoint.parent / LATIN)
    for arguments in (
        ["prune", "tiny", "--layers", "1", "-o", "out"],
        ["prune", "tiny", "--layers", "1", "--device", "disk", "-o", "out"],
        ["compress", "tiny", "--device", "disk", "--method", "magnitude", "--sparsity", "0.5", "-o", "out"],
    ):
        done = run(*arguments)
        assert (done.code, done.err.count("\n"), done.changed) == (2, 1, set())


def test_a_rank_without_other_processes_silences_nothing(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert "perplexity" in run("eval", "tiny", *TEXT).out
