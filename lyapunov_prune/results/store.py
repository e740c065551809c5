"""What is not measured twice: a result file, if all parameters are the same, and finished jobs on disk, one line each.

Finished jobs survive `kill -9`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.progress import is_main, process
from lyapunov_prune.results.claim import Claim, Claimed
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
            f"{path} was measured with other settings, on other text or on another model, and would be replaced; rank "
            "it as it is (rank FILE), or give another --output"
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


class Store(Claimed):
    """Results by key in `folder/<process>.jsonl`; in memory only when `folder` is None.

    Every process appends to its own file and reads the files of all. A line is complete when its newline is written:
    incomplete lines are dropped, so at most the job in flight is lost. The folder is claimed (`claim.py`) for this
    `kind` and the question `about`, and every line holds the claim's origin. Finished jobs of the same question are
    kept; those of another question are deleted, which a line on stderr says (`replaced` is then True). With `about`
    None all are deleted without a word. `close`, or the end of a `with` block, releases the folder.

    Raises LyapunovPruneError when a file is damaged or of another question than the header, when the folder belongs to
    another kind of work or another run is at work in it, or when the disk refuses.
    """

    def __init__(self, folder: str | Path | None, kind: str, about: Mapping[str, Any] | None) -> None:
        self._done: dict[str, Any] = {}
        self._file: Path | None = None
        if folder is None:
            return
        folder = Path(folder)
        self._file = folder / f"{process()}.jsonl"
        self._take(Claim(folder, kind, about, self._file.name), self._begin)

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Any:
        return self._done[key]

    def add(self, key: str, value: Any) -> None:
        """Store the strict-JSON `value` under `key`; it is on the disk on return."""
        self._done[key] = value
        if self._file is None or self._claim is None:
            return
        self._claim.hold()
        remedy = "free space and run again, which continues"
        with reported(f"cannot write {self._file}", remedy), self._file.open("ab") as file:
            line = json.dumps({"origin": self._claim.origin, "key": key, "value": value}, allow_nan=False)
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())

    def learn(self, others: Mapping[str, Any]) -> None:
        """Take over the results of other processes, which have written them."""
        self._done.update(others)

    def items(self) -> dict[str, Any]:
        return dict(self._done)

    @property
    def replaced(self) -> bool:
        """Whether work on another question was found here and deleted."""
        return self._claim is not None and bool(self._claim.other)

    def _begin(self, claim: Claim) -> None:
        if claim.begin(self._files):
            for path in self._files():
                self._done.update(claim.own(path, self._read))
        elif claim.other and is_main():  # for all processes, because a later run reads the files of all
            for path in self._files():
                path.unlink()
            claim.give_up()
            claim.say_replaced()

    def _files(self) -> list[Path]:
        assert self._file is not None
        paths = self._file.parent.glob("*.jsonl")
        return sorted(path for path in paths if re.fullmatch("0|[1-9][0-9]*", path.stem))

    def _read(self, path: Path) -> tuple[set[str], dict[str, Any]]:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if path == self._file and len(whole) < len(text):
            os.truncate(path, len(whole))
        rows = [parsed(line.decode()) for line in whole.splitlines()]
        return {row["origin"] for row in rows}, {row["key"]: row["value"] for row in rows}


def clear_results(folder: Path, kind: str) -> None:
    """Delete the finished jobs of this kind in `folder`, of any run. Raises like Store."""
    Store(folder, kind, None).close()
