"""A folder of unfinished work belongs to one run: a header says to which, and a lock that this run is alive."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.files import parsed, release_lock, write_whole

HEADER = "lyapunov-prune.json"


class Claim:
    """The right of one run to what is stored in `folder`; without it nothing there is read, written or deleted.

    The header is the first file in a new folder and names the `kind` of work and what it is `about`. `origin`, a hash
    of both, stands in every stored piece, so that one of another run is known for what it is. The lock is that of
    `part`, for the processes of one run share a folder; it ends with `release` or the process, whatever ends that.

    Raises LyapunovPruneError when the folder holds another kind of work, while another run holds the lock, or when
    the disk refuses.
    """

    def __init__(self, folder: Path, kind: str, about: Mapping[str, Any], part: str) -> None:
        self.folder = folder
        self._told = {"kind": kind, "about": json.loads(json.dumps(about))}
        self.origin = hashlib.sha256(json.dumps(self._told, sort_keys=True).encode()).hexdigest()[:16]
        # An object a thread would let a run lose its lock to its own threads.
        self._lock = FileLock(folder / f".{part}.lock", timeout=0, thread_local=False)
        self._held = False

    def begin(self, pieces: Callable[[], list[Path]], resume: bool) -> bool:
        """Whether an earlier run has claimed the folder; if so it is this run's now, else from `hold` on.

        `pieces` finds the files and folders there that are named like what this run stores. Raises LyapunovPruneError
        when there are some but no header, and with `resume` when the folder is about something else.
        """
        told = self._read()
        if told is not None:
            self._acquire()
            told = self._read()  # the run that has just ended may have left nothing
        if told is None:
            if stored := pieces():  # looked for only now: who clears a folder takes the header last
                raise LyapunovPruneError(
                    f"{self.folder} holds {stored[0].name} and no {HEADER} that says whose it is; give another folder"
                )
            return False
        if resume and told != self._told:
            raise LyapunovPruneError(
                f"{self.folder} was measured on {_difference(told['about'], self._told['about'])}; run without --resume"
            )
        return True

    def hold(self) -> None:
        """Make the folder this run's, if it is not already; before the first piece is written."""
        if self._held:
            return
        self._acquire()
        told = self._read()
        if told is None:
            write_whole(self.folder / HEADER, json.dumps(self._told) + "\n")
        elif told != self._told:
            raise LyapunovPruneError(f"another run has begun in {self.folder}; give another folder")
        self._held = True

    def give_up(self) -> None:
        """Nothing of the run is left in the folder: it is nobody's, until the next `hold`."""
        (self.folder / HEADER).unlink(missing_ok=True)
        self._held = False

    def release(self, error: BaseException | None = None) -> None:
        """Let another run have the folder and delete the lock file; a folder that is nobody's and empty goes.

        `error`, which ends the run, gets the folder as its `unfinished` where finished pieces stay there.
        """
        if error is not None and (self.folder / HEADER).exists():
            error.unfinished = self.folder  # type: ignore[attr-defined]
        if not self._lock.is_locked:
            return
        release_lock(self._lock)
        if not (self.folder / HEADER).exists():
            with suppress(OSError):  # others may have put something there
                self.folder.rmdir()
        self._held = False

    def _acquire(self) -> None:
        if self._lock.is_locked:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise LyapunovPruneError(
                f"another run is at work in {self.folder}; wait for its end or give another folder"
            ) from None
        except OSError as error:
            raise LyapunovPruneError(
                f"cannot write {self._lock.lock_file}: {error.strerror}; give another folder"
            ) from None

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / HEADER
        try:
            told = parsed(path.read_text(encoding="utf-8"))
            kind, about = told["kind"], dict(told["about"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise LyapunovPruneError(f"{path} is damaged or of something else; give another folder") from None
        if kind != self._told["kind"]:
            raise LyapunovPruneError(f"{self.folder} holds a {kind}; give another folder")
        return {"kind": kind, "about": about}


def _difference(told: dict[str, Any], wanted: dict[str, Any]) -> str:
    key = next((k for k in wanted if told.get(k) != wanted[k]), None)
    return f"another {key} ({str(told.get(key))[:60]})" if key else "something else"
