"""Finished jobs on disk, one line each: what is there after `kill -9` is never done again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lyapunov_prune.errors import LyapunovPruneError


class Store:
    """Results by key, in `folder/<process>.jsonl`; in memory alone when `folder` is None.

    Every process appends to a file of its own and reads those of all. A line is complete when its newline is
    there: what a kill cut off is dropped, and at most the job in flight is lost. The first line says what the
    results were measured on (`about`). With `resume` the finished jobs are kept, without it they are deleted.

    Raises LyapunovPruneError when a file was written about something else, or the disk refuses.
    """

    def __init__(self, folder: str | Path | None, about: Mapping[str, Any], *, resume: bool = False) -> None:
        self._about = json.loads(json.dumps(about))
        self._done: dict[str, Any] = {}
        self._file: Path | None = None
        if folder is None:
            return
        folder = Path(folder)
        self._file = folder / f"{os.environ.get('RANK', '0')}.jsonl"
        files = sorted(path for path in folder.glob("*.jsonl") if path.stem.isdecimal())
        if resume:
            for path in files:
                self._read(path)
        else:
            # Files of processes that this run does not have must not be read by a later --resume.
            last = int(os.environ.get("WORLD_SIZE", "1")) - 1
            for path in files:
                if path == self._file or (self._file.stem == "0" and int(path.stem) > last):
                    path.unlink()

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Any:
        return self._done[key]

    def add(self, key: str, value: Any) -> None:
        """Keep the strict-JSON `value` under `key`; on return it is on the disk."""
        self._done[key] = value
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                if file.tell() == 0:
                    file.write(_line({"about": self._about}))
                file.write(_line({"key": key, "value": value}))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LyapunovPruneError(
                f"cannot write {self._file}: {error.strerror}; free space and go on with --resume"
            ) from None

    def learn(self, others: Mapping[str, Any]) -> None:
        """Take over what other processes found; they have written it."""
        self._done.update(others)

    def items(self) -> dict[str, Any]:
        return dict(self._done)

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if path == self._file and len(whole) < len(text):
            os.truncate(path, len(whole))
        lines = whole.splitlines()
        if not lines:
            return
        try:
            about, *rows = [json.loads(line) for line in lines]
            found = {row["key"]: row["value"] for row in rows}
            told = about["about"]
        except (ValueError, KeyError, TypeError):
            raise LyapunovPruneError(f"{path} is damaged; run without --resume") from None
        if told != self._about:
            raise LyapunovPruneError(
                f"{path.parent} was measured on {_difference(told, self._about)}; run without --resume"
            )
        self._done.update(found)


def _line(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def _difference(told: Any, wanted: Any) -> str:
    if not isinstance(told, dict):
        return "something else"
    key = next((k for k in wanted if told.get(k) != wanted[k]), None)
    return f"another {key} ({str(told.get(key))[:60]})" if key else "something else"
