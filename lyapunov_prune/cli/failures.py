"""How a command that failed ends: one line on stderr and an exit code, whatever was raised.

2 is what the user can mend, 1 a check that failed, 3 what nobody foresaw or what could not be shown: its trace is kept.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import typer

from lyapunov_prune.cli.jobs import JOBS
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError, did_you_mean, first_of, printable, reported
from lyapunov_prune.progress import end_status

# What is wrong with a path that was given, wherever it is met.
_NAMES = ("EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG", "ELOOP")
_ROOM = ("ENOSPC", "EDQUOT", "EFBIG")
_PACKAGE = Path(__file__).parents[1]
_OF_PATHS = {getattr(errno, name) for name in (*_NAMES, *_ROOM)}
# As the backends of torch.distributed say it of a process that ended while others waited for it.
_PEER_LOST = re.compile(r"gloo.*(closed|reset) by peer|ncclRemoteError", re.DOTALL)
_NO_MEMORY = os.strerror(errno.ENOMEM)  # as torch and the operating system say it, in whatever error
READER_GONE = 141  # as a shell tells of a process that SIGPIPE ended
_LONGEST = 300  # characters of what is repeated of the command line, and of an error's own words


class Unforeseen(LyapunovPruneError):
    """What no room refuses in its own words."""

    exit_code = 3


def as_refusal(error: BaseException, arguments: list[str]) -> LyapunovPruneError:
    """`error`, raised under these `arguments` of the command line, as one line with an exit code."""
    if isinstance(error, LyapunovPruneError):
        return error
    if isinstance(error, typer.TyperException):  # a usage error
        told = error.format_message().rstrip(".").replace("Value error, ", "")  # pydantic's prefix
        context = getattr(error, "ctx", None)  # of the command whose usage is wrong
        name = "lyapunov-prune" if context is None else context.command_path
        return LyapunovPruneError(f"{_short(told)}{_meant(told)}; see {name} --help")
    if type(error).__name__ == "OutOfMemoryError":  # torch's own, and torch may not have been imported
        told = str(error).partition(". ")[0]
        return LyapunovPruneError(f"{told}; lower --context, or give --device cpu")
    if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
        return LyapunovPruneError(
            "the memory is full; lower --context, give a smaller model, or --device disk to a command that has it"
        )
    if isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)):
        return LyapunovPruneError("another process failed, see its message; correct that and start all of them again")
    file = getattr(error, "filename", None)
    if isinstance(error, OSError) and error.errno in _OF_PATHS and file is not None:
        return LyapunovPruneError(f"{_short(str(file))}: {error.strerror}; give another path, or make room there")
    return Unforeseen(
        f"{_short(' '.join(arguments))}: {type(error).__name__} in {_place(error)}"
        f"{f' at {_short(str(file))}' if file is not None else ''}: {_short(str(error)) or 'no words'}; "
        f"{_kept(error, arguments)}"
    )


def require_sound_process() -> None:
    """Raise LyapunovPruneError for a process in which libraries fail with errors that do not say why."""
    wrong = {
        "stdout is closed, but results are printed there; leave it open, or redirect it to /dev/null": (
            sys.stdout is None
        ),
        "Python runs without docstrings (PYTHONOPTIMIZE=2, -OO), which transformers reads; run without that": (
            sys.flags.optimize > 1
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)
    with reported("the current folder cannot be used", "change to another"):
        Path.cwd()


@contextmanager
def printing() -> Iterator[None]:
    """Within the block, stdout may take no more: a reader that went away ends the process without a word, as elsewhere.

    stdout is then put aside: Python would write what is left to it once more at its end.
    """
    try:
        yield
    except OSError as error:
        put_aside(sys.stdout)
        if error.errno == errno.EPIPE:
            sys.exit(READER_GONE)
        raise Unforeseen(
            f"cannot print on stdout: {error.strerror}; what was measured is saved, run again to see it"
        ) from None


def tell(line: str) -> None:
    """Print `line` on stderr, where that takes it."""
    end_status()
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        put_aside(sys.stderr)


def put_aside(stream: TextIO | None) -> None:
    """Let what is written to `stream` from now on go nowhere."""
    for own in (sys.__stdout__, sys.__stderr__):
        if own is not None and own is stream:
            os.dup2(os.open(os.devnull, os.O_WRONLY), own.fileno())


def interrupted(began: float) -> str:
    """What to say to someone who pressed Ctrl-C in a command that began at that time (`time.time`)."""
    from lyapunov_prune.results.claim import unfinished

    if not any(each.used.timestamp() >= began for each in unfinished(JOBS)):
        return "stopped; nothing was finished"
    return f"stopped; {JOBS} keeps what is finished, and the same command continues there"


def _meant(told: str) -> str:
    """Which of the choices that typer's message lists was meant."""
    found = re.search(r"'([^']*)' is not one of (.*)", told)
    if not found:
        return ""
    word, known = found[1].lower(), re.findall(r"'([^']*)'", found[2])
    widths = [method for method in known if method in METHODS and METHODS[method].unit == "bits"]
    bits = re.fullmatch(r"(?:int|nf|fp|w|q)?([2-8])(?:-?bits?|a\d+)?", word)  # what others call a method
    if bits and widths:
        return f" (did you mean {' or '.join(widths)}, with --bits {bits[1]}?)"
    return did_you_mean(word, known, cutoff=0.5)


def _place(error: BaseException) -> str:
    """The innermost function of this package on the way to `error`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(_PACKAGE)]
    return f"{frames[-1].name} ({Path(frames[-1].filename).relative_to(_PACKAGE)}:{frames[-1].lineno})"


def _kept(error: BaseException, arguments: list[str]) -> str:
    """Where the whole trace was saved: a file of its own, which nobody else can have put there."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="lyapunov-prune-", suffix=".trace.txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"lyapunov-prune {printable(' '.join(arguments))}\n{''.join(traceback.format_exception(error))}")
    except OSError as refused:
        return f"its trace could not be saved ({refused.strerror}); free space, run again and report what it says"
    return f"please report it with {name}, which holds the trace"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
