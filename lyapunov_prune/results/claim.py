"""Where unfinished work is kept: each question has a folder of its own, named by the digest of its settings."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lyapunov_prune.errors import LyapunovPruneError, printable, reported
from lyapunov_prune.results.files import parsed, release_lock, write_whole

HEADER = "lyapunov-prune.json"
_LOCK = ".lock"


class Kept:
    """Work on one question, kept in `place`, a subfolder of `folder`; `place` is None if `folder` is.

    The question is the `kind` of work and what it is `about`, all that its numbers depend on. Their digest names
    `place`, so that the work on every other question lies beside it and is left alone; a header in it says in words
    what it is. It appears with the first piece (`hold`) and goes by `forget` alone. If the work is to be done `alone`,
    a lock keeps other runs out until `close`, the end of a `with` block or that of the process.

    Raises LyapunovPruneError while another run holds the lock, and when the disk refuses.
    """

    def __init__(self, folder: str | Path | None, kind: str, about: Mapping[str, Any], *, alone: bool = True) -> None:
        self.place: Path | None = None
        self._lock: FileLock | None = None
        if folder is None:
            return
        self._header = {"kind": kind, "about": json.loads(json.dumps(about))}
        digest = hashlib.sha256(json.dumps(self._header, sort_keys=True).encode()).hexdigest()[:16]
        self.place = Path(folder) / f"{kind.replace(' ', '-')}-{digest}"
        if alone:
            # thread_local would let a run lose its lock to its own threads.
            self._lock = FileLock(self.place / _LOCK, timeout=0, thread_local=False)
            with _acquiring(self.place):
                self.place.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()

    def hold(self) -> None:
        """Make `place`, before the first piece is written."""
        if self.place is not None and not (self.place / HEADER).exists():
            write_whole(self.place / HEADER, json.dumps({**self._header, "command": sys.argv[1:]}) + "\n")

    def forget(self) -> None:
        """Delete the work, which is done."""
        if self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)

    def close(self) -> None:
        """Let other runs in."""
        if self._lock is not None:
            release_lock(self._lock)
        if self.place is not None:
            for folder in (self.place, self.place.parent):
                with suppress(OSError):  # not there, or something is in it
                    folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _acquiring(place: Path) -> Iterator[None]:
    """Report a lock of `place` that another run holds, and a disk that refuses."""
    with reported(f"cannot write in {place}", "make room there, or run it elsewhere"):
        try:
            yield
        except Timeout:
            raise LyapunovPruneError(f"another run is at work in {place}; wait until it has ended") from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Report whatever goes wrong while the piece of work at `path` is read as LyapunovPruneError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        raise LyapunovPruneError(f"{path} is damaged or of another run; delete it and run again") from None


@dataclass(frozen=True)
class Unfinished:
    """Kept work: its `kind`, the `command` that continues it, its folder, its bytes, and when it was last added to."""

    kind: str
    command: str
    folder: Path
    size: int
    used: datetime


def unfinished(folder: Path) -> list[Unfinished]:
    """All work that is kept in `folder`, what was added to last first."""
    found = []
    for header in folder.glob(f"*/{HEADER}"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # another process deletes it
            told = parsed(header.read_text(encoding="utf-8"))
            states = [path.stat() for path in header.parent.rglob("*") if path.is_file()]
            used = datetime.fromtimestamp(max(state.st_mtime for state in states), UTC)
            size = sum(state.st_size for state in states)
            command = printable(" ".join(told["command"]))
            found.append(Unfinished(str(told["kind"]), command, header.parent, size, used))
    return sorted(found, key=lambda each: each.used, reverse=True)


def clear_unfinished(folder: Path) -> None:
    """Delete all work that is kept in `folder`, unless a run is at work on it, and nothing else.

    Raises LyapunovPruneError if a run is at work there, or a file cannot be deleted.
    """
    for each in unfinished(folder):
        lock = FileLock(each.folder / _LOCK, timeout=0)
        with _acquiring(each.folder):
            lock.acquire()
            shutil.rmtree(each.folder)
            lock.release()
    with suppress(OSError):  # missing, or holds other files
        folder.rmdir()
