"""Files appear whole or not at all, with the permissions that the umask leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lyapunov_prune.errors import LyapunovPruneError

RETRY = "free space and retry"
_PARTIAL = ".partial-"
_RANDOM_BYTES = 8  # of the name of a temporary folder, in hexadecimal
_TOO_LARGE = os.strerror(errno.EFBIG)
_LONGEST_NAME = 200  # of 255 bytes: what is unfinished has a longer one


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
    """Write `text` to `path` through a temporary file beside it, so no reader sees half of it, nor a power cut."""
    path = Path(path)
    _require_own_rights()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        try:
            # tempfile's would be the owner's alone; names of no encoding may stand in the text
            with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LyapunovPruneError(f"cannot write {path}: {error.strerror}; free space or choose another place") from None
    return path


@contextmanager
def whole_folder(target: str | Path, remedy: str = RETRY) -> Iterator[Path]:
    """A temporary folder beside `target`, renamed to it at the end; removed if anything fails.

    What a killed process left for the same target goes as well: a lock beside it says whether its process lives. A
    mount point cannot be replaced and is filled instead, `config.json` last, without which nobody takes it for whole.
    Raises LyapunovPruneError when the target exists and is not empty, or the disk refuses: then it ends in `remedy`.
    """
    require_empty(target)
    target = Path(target).resolve()  # "." has no name to build on, a link cannot be replaced by a folder
    temporary = target.parent / f".{target.name}{_PARTIAL}{secrets.token_hex(_RANDOM_BYTES)}"
    lock = FileLock(f"{temporary}.lock", timeout=0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(target)
        try:
            lock.acquire()
        except NotImplementedError:  # a file system without locks: what a kill leaves stays
            Path(lock.lock_file).unlink(missing_ok=True)
        temporary.mkdir()
    except OSError as error:
        release_lock(lock)
        told = error.strerror or str(error).rstrip(".")  # of a lock that could not be had
        raise LyapunovPruneError(f"cannot write beside {target}: {told}; choose another place") from None
    try:
        yield temporary
        _open_as_folder(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        _put(temporary, target)
        _sync(target.parent)
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and "(os error " not in str(error):  # as of tokenizers
            raise
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST):
            raise LyapunovPruneError(
                f"another process has filled {target} meanwhile; choose another --output"
            ) from None
        if _TOO_LARGE in str(reason):
            remedy = "the disk or a limit takes no file so large; choose another place"
        raise LyapunovPruneError(f"writing {target} failed: {reason}; nothing was left there, {remedy}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        release_lock(lock)


def _put(temporary: Path, target: Path) -> None:
    try:
        if target.exists():
            target.rmdir()  # empty, as required; fails if something appeared meanwhile
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        _fill(temporary, target)


def _fill(temporary: Path, target: Path) -> None:
    """Move what is in `temporary` into the empty folder `target`, all or nothing unless killed."""
    target.mkdir(exist_ok=True)
    require_empty(target)
    moved: list[Path] = []
    try:
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            moved.append(target / path.name)
            shutil.move(path, moved[-1])
            _sync(moved[-1])
        _sync(target)
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def halves(folder: Path, name: str) -> list[Path]:
    """Temporary folders and locks of `whole_folder` in `folder`, for targets whose name matches the regex `name`."""
    temporary = re.compile(rf"\.(?:{name}){re.escape(_PARTIAL)}[0-9a-f]{{{2 * _RANDOM_BYTES}}}(\.lock)?")
    return [path for path in folder.glob(f".*{_PARTIAL}*") if temporary.fullmatch(path.name)]


def _remove_dead(target: Path) -> None:
    """Remove what processes that are gone left beside `target`. Their locks went with them."""
    for path in halves(target.parent, re.escape(target.name)):
        if not path.is_dir():
            continue
        lock = FileLock(f"{path}.lock", timeout=0)
        if not Path(lock.lock_file).exists():  # of an older version: nobody knows
            continue
        with suppress(Timeout, OSError, NotImplementedError):
            lock.acquire()
            shutil.rmtree(path, ignore_errors=True)
            release_lock(lock)


def release_lock(lock: FileLock) -> None:
    """Delete the file of a `lock` that is held, then let go of it.

    In this order no two processes hold one lock: a process that waits on the deleted file sees that no name leads to
    it and opens the new one (filelock checks this since 3.21).
    """
    if lock.is_locked:
        with suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _sync(path: Path) -> None:
    """On return what `path` holds, or which names a folder holds, is on the disk, where the system can tell."""
    with suppress(PermissionError, IsADirectoryError):  # Windows opens no folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    """Raise LyapunovPruneError unless `target` is absent or an empty folder, and a folder can be put there."""
    target = Path(target)
    require_writable(target.parent)
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
        name = target.resolve().name
        os.fspath(target.resolve()).encode()  # libraries take no folder of another encoding, nor one above
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a name of no encoding
        reason = getattr(error, "strerror", None) or error
        raise LyapunovPruneError(f"{str(target)[:200]} cannot be a folder: {reason}; choose another --output") from None
    if len(name.encode()) > _LONGEST_NAME:
        raise LyapunovPruneError(f"{name[:40]}… is too long to name a folder; choose another --output")
    if target.is_file():
        raise LyapunovPruneError(f"{target} is a file, and a folder is written; choose another --output")
    if taken:
        raise LyapunovPruneError(f"{target} exists and is not empty; choose another --output or empty it")


def require_disk(folder: str | Path, needed: int, what: str, remedy: str = "choose another place") -> None:
    """Raise LyapunovPruneError, which ends in `remedy`, unless the disk of `folder` has `needed` bytes free.

    The folder need not be there yet.
    """
    folder = Path(folder).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        raise LyapunovPruneError(
            f"{what} need {needed:,} bytes of disk in {folder} and {free:,} are free; free some, or {remedy}"
        )


def _require_own_rights() -> None:
    """Raise LyapunovPruneError for a umask that keeps even the owner from what is written."""
    mask = os.umask(0)  # there is no other way to ask
    os.umask(mask)
    if mask & 0o700:
        raise LyapunovPruneError(f"the umask is {mask:03o}: you could not open what is written; set another, as 022")


def require_writable(folder: str | Path, remedy: str = "give another --output") -> None:
    """Raise LyapunovPruneError, which ends in `remedy`, unless files can be written in `folder`, made or not yet."""
    folder = Path(folder)
    _require_own_rights()
    for place in (folder, *folder.parents):
        try:
            mode = os.stat(place).st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LyapunovPruneError(f"cannot write in {str(folder)[:200]}: {reason}; {remedy}") from None
        if not stat.S_ISDIR(mode):
            raise LyapunovPruneError(f"cannot write in {folder}: {place} is no folder; {remedy}")
        if not os.access(place, os.W_OK | os.X_OK):
            raise LyapunovPruneError(f"cannot write in {folder}: {place} is not yours to write; {remedy}")
        return
