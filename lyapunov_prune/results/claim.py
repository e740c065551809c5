"""A folder of unfinished work belongs to one question: a header names it, and a lock shows that a run is alive."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.progress import warn
from lyapunov_prune.results.files import parsed, release_lock, write_whole

T = TypeVar("T")

HEADER = "lyapunov-prune.json"


class Claim:
    """The right of one run to the contents of `folder`; without it nothing there is read, written or deleted.

    The header is the first file in a new folder and names the `kind` of work and what it is `about` (None: nothing
    that could be continued). `origin`, a hash of both, is stored in every piece of work, so that pieces of another
    question are recognised. `other` says after `begin` what differs if the folder held work on another question. The
    lock is per `part`, because the processes of one run share a folder; it ends with `release` or with the process.

    Raises LyapunovPruneError when the folder holds another kind of work, while another run holds the lock, or when the
    disk refuses.
    """

    def __init__(self, folder: Path, kind: str, about: Mapping[str, Any] | None, part: str) -> None:
        self.folder = folder
        self.other = ""
        self._header = {"kind": kind, "about": json.loads(json.dumps(about))}
        self.origin = hashlib.sha256(json.dumps(self._header, sort_keys=True).encode()).hexdigest()[:16]
        # thread_local would let a run lose its lock to its own threads.
        self._lock = FileLock(folder / f".{part}.lock", timeout=0, thread_local=False)
        self._held = False

    def begin(self, pieces: Callable[[], list[Path]]) -> bool:
        """Whether an earlier run on the same question has claimed the folder; this run then continues its work.

        If the folder is about another question, `other` says what differs: delete its pieces, then call `give_up`.
        `pieces` lists the files and folders there that are named like the pieces of this run. Raises LyapunovPruneError
        when there are some but no header.
        """
        found = self._read()
        if found is not None:
            self._acquire()
            found = self._read()  # the previous run may have left nothing
        if found is None:
            if stored := pieces():  # after the header, which is deleted last when a folder is cleared
                raise LyapunovPruneError(
                    f"{self.folder} holds {stored[0].name} and no {HEADER} that says whose it is; give another folder"
                )
            return False
        if found != self._header:
            self.other = _difference(found["about"], self._header["about"])
        return not self.other

    def say_replaced(self) -> None:
        """Tell the user that the work on another question was deleted, if this run has a question of its own."""
        if self._header["about"] is not None:
            warn(f"{self.folder} held unfinished work on {self.other}; it was deleted, and this run starts afresh")

    def require_idle(self) -> None:
        """Raise LyapunovPruneError if another run is at work in the folder."""
        if self._read() is not None:
            self._acquire()
            self.release()

    def hold(self) -> None:
        """Claim the folder for this run, if it is not yet; call before the first piece is written."""
        if self._held:
            return
        self._acquire()
        found = self._read()
        if found is None:
            write_whole(self.folder / HEADER, json.dumps(self._header) + "\n")
        elif found != self._header:
            raise LyapunovPruneError(f"another run has begun in {self.folder}; give another folder")
        self._held = True

    def give_up(self) -> None:
        """Delete the header: the folder belongs to no run until the next `hold`."""
        (self.folder / HEADER).unlink(missing_ok=True)
        self._held = False

    def release(self, error: BaseException | None = None) -> None:
        """Release the folder and delete the lock file; an empty folder without a header is removed.

        `error`, which ends the run, gets the folder as its `unfinished` attribute if finished pieces stay there.
        """
        if error is not None and (self.folder / HEADER).exists():
            error.unfinished = self.folder  # type: ignore[attr-defined]
        if not self._lock.is_locked:
            return
        release_lock(self._lock)
        if not (self.folder / HEADER).exists():
            with suppress(OSError):  # someone else may have written there
                self.folder.rmdir()
        self._held = False

    def own(self, path: Path, read: Callable[[Path], tuple[set[str], T]]) -> T:
        """What `read` makes of a piece of work of this run, beside the origins that it finds there.

        Raises LyapunovPruneError for a piece that it cannot read, and for one of another run.
        """
        with suppress(OSError, SafetensorError, ValueError, KeyError, TypeError):
            origins, found = read(path)
            if origins <= {self.origin}:
                return found
        raise LyapunovPruneError(f"{path} is damaged or of another run; delete {path.parent} and run again")

    def _acquire(self) -> None:
        if self._lock.is_locked:
            return
        remedy = "give another folder, or wait if another run is at work there"
        with reported(f"cannot write in {self.folder}", remedy, Timeout, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / HEADER
        try:
            header = parsed(path.read_text(encoding="utf-8"))
            kind, about = header["kind"], dict(header["about"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError):
            kind, about = "damaged file", {}
        if kind != self._header["kind"]:
            raise LyapunovPruneError(f"{path} is of a {kind}, not of a {self._header['kind']}; give another folder")
        return {"kind": kind, "about": about}


class Claimed:
    """Work in a folder that one run holds, or without a folder; `close`, or the end of a `with` block, releases it."""

    _claim: Claim | None = None

    def _take(self, claim: Claim, begin: Callable[[Claim], None]) -> None:
        self._claim = claim
        with ExitStack() as undo:
            undo.callback(self.close)  # else the traceback keeps the lock alive
            begin(claim)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        if self._claim is not None:
            self._claim.release(error)


def _difference(found: dict[str, Any], wanted: dict[str, Any] | None) -> str:
    key = next((k for k in wanted or {} if found.get(k) != (wanted or {})[k]), None)
    return f"another {key} ({str(found.get(key))[:60]})" if key else "something else"
