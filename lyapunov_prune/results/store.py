"""What is not measured twice: a result file, if all parameters are the same, and finished jobs on disk, one line each.

Finished jobs survive `kill -9`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.results.claim import Kept, readable
from lyapunov_prune.results.encoding import encode
from lyapunov_prune.results.files import parsed
from lyapunov_prune.results.result import ASKED, MeasuredOn, Result

R = TypeVar("R", bound=Result)


def once(
    path: str | Path,
    kind: type[R],
    origin: MeasuredOn,
    parameters: Mapping[str, Any],
    measure: Callable[[], R],
    *,
    shared: bool = False,
) -> R:
    """The result at `path` if it was measured on `origin` with exactly these `parameters`, else a new one, saved there.

    `parameters` holds everything the numbers depend on besides the model and its tokens: method, ε, seeds, temperature,
    changes of the model. They are stored in the file under `asked`. A file with other or unknown parameters is
    replaced, so `path` must not be used by others. If it is (`shared`), such a file raises LyapunovPruneError before
    anything is measured.
    """
    path = Path(path)
    asked = json.loads(json.dumps(encode({"origin": replace(origin, fingerprint=None, short=None), **parameters})))
    same = _asked(path) == asked
    if shared and path.exists() and not same:
        raise LyapunovPruneError(
            f"{path} would be replaced, and was measured with other settings, text or model; rank it as it is (rank "
            "FILE), or give another --output"
        )
    if same:
        return kind.load(path)
    result = measure()
    result.save(path, asked)
    return result


def _asked(path: Path) -> Any:
    try:
        return parsed(path.read_text(encoding="utf-8"))[ASKED]
    except (OSError, ValueError, KeyError, TypeError):  # missing, incomplete, or not written by `once`
        return None


class Store(Kept):
    """Results by key, in `folder/<kind>-<digest>/<random>.jsonl`; in memory only when `folder` is None.

    The question is as in `Kept`. Every process appends to its own file and reads the files of all, so that runs which
    measure the same share what is finished, also while both are at work; with `alone` there is one run at a time. A
    line is complete when its newline is written: incomplete lines are dropped, so at most the job in flight is lost.

    Raises LyapunovPruneError when a file is damaged, when the disk refuses, and with `alone` as `Kept`.
    """

    def __init__(self, folder: str | Path | None, kind: str, about: Mapping[str, Any], *, alone: bool = False) -> None:
        super().__init__(folder, kind, about, alone=alone)
        self._done: dict[str, Any] = {}
        self._file: Path | None = None
        if self.place is None:
            return
        self._file = self._new_file()
        with ExitStack() as undo:
            undo.callback(self.close)  # else the traceback keeps the lock alive
            for path in sorted(self.place.glob("*.jsonl")):
                with readable(path):
                    whole = path.read_bytes()
                    rows = [parsed(line.decode()) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
                    self._done.update({row["key"]: row["value"] for row in rows})
            undo.pop_all()

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Any:
        return self._done[key]

    def add(self, key: str, value: Any) -> None:
        """Store the strict-JSON `value` under `key`; it is on the disk on return."""
        line = json.dumps({"key": key, "value": value}, allow_nan=False)
        self._done[key] = value
        if self._file is None:
            return
        self.hold()
        file, self._file = self._file, self._new_file()  # a line that is torn has no successor
        with reported(f"cannot write {file}", "free space and run again, which continues"), file.open("ab") as lines:
            lines.write(f"{line}\n".encode())
            lines.flush()
            os.fsync(lines.fileno())
        self._file = file

    def _new_file(self) -> Path:
        assert self.place is not None
        return self.place / f"{secrets.token_hex(8)}.jsonl"

    def learn(self, others: Mapping[str, Any]) -> None:
        """Take over the results of other processes, which have written them."""
        self._done.update(others)

    def items(self) -> dict[str, Any]:
        return dict(self._done)
