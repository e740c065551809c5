"""Files appear whole or not at all, with the permissions that the umask leaves."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lyapunov_prune.errors import LyapunovPruneError


def parsed(text: str) -> Any:
    """What the JSON in `text` says; whatever is wrong with it, nesting without end too, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def require_file(path: str | Path) -> None:
    """Raise LyapunovPruneError for what is there and is no file: a pipe would be waited for."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise LyapunovPruneError(f"{path} is no file but a pipe or a device; give a file")


def write_whole(path: str | Path, text: str) -> Path:
    """Write `text` to `path` through a temporary file beside it, so no reader sees half of it."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        try:
            with temporary.open("x", encoding="utf-8") as file:  # tempfile's would be the owner's alone
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LyapunovPruneError(f"cannot write {path}: {error.strerror}; free space or choose another place") from None
    return path


@contextmanager
def whole_folder(target: str | Path) -> Iterator[Path]:
    """A temporary folder beside `target`, renamed to it at the end; removed if anything fails.

    Raises LyapunovPruneError when the target exists and is not empty, or the disk refuses.
    """
    target = Path(target).resolve()  # "." has no name to build on, a link cannot be replaced by a folder
    require_empty(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.partial-{secrets.token_hex(8)}"
        temporary.mkdir()
    except OSError as error:
        raise LyapunovPruneError(f"cannot write beside {target}: {error.strerror}; choose another place") from None
    try:
        yield temporary
        _open_as_folder(temporary)
        if target.exists():
            target.rmdir()  # empty, as required above; fails if something appeared meanwhile
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LyapunovPruneError(
            f"writing {target} failed: {reason}; nothing was left there, free space and retry"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open_as_folder(folder: Path) -> None:
    """Give the files in `folder` the permissions that the umask gave the folder: safetensors makes them the owner's."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def folder_digest(folder: str | Path) -> str:
    """SHA-256 over names, sizes and times of all in `folder`: whatever anybody puts or changes there alters it."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        # The times of a folder tell less than the names in it, and change on the way.
        stamp = (status.st_size, status.st_mtime_ns) if path.is_file() else ()
        digest.update(repr((path.relative_to(folder).as_posix(), *stamp)).encode())
    return digest.hexdigest()


def require_empty(target: str | Path) -> None:
    """Raise LyapunovPruneError unless `target` is absent or an empty folder."""
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LyapunovPruneError(f"{target} exists and is not empty; choose another --output or empty it")
