"""Write files whole or not at all, with the permissions of the umask."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lyapunov_prune.errors import LyapunovPruneError, reason_of, reported

RETRY = "free space and retry"
_PARTIAL = ".partial-"
_RANDOM_BYTES = 8  # in the name of a temporary folder
_TOO_LARGE = os.strerror(errno.EFBIG)
_LONGEST_NAME = 200  # of 255 bytes: temporary names are longer


def parsed(text: str) -> Any:
    """The JSON in `text`; every fault, including endless nesting, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def require_file(path: str | Path) -> None:
    """Raise LyapunovPruneError for something that is not a file, because reading a pipe would block."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise LyapunovPruneError(f"{path} is a pipe or a device; give a file")


def write_whole(path: str | Path, text: str) -> Path:
    """Write `text` to `path` through a temporary file, so that neither a reader nor a power cut sees half of it."""
    path = Path(path)
    _require_own_rights()
    with reported(f"cannot write {path}", "free space or choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        try:
            # A file of tempfile would be private to the owner. The text may hold undecodable file names.
            with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def whole_folder(target: str | Path, remedy: str = RETRY) -> Iterator[Path]:
    """A temporary folder next to `target`, renamed to it at the end and removed on failure.

    Leftovers of killed processes for the same target are removed too; a lock shows whether a process is alive. A mount
    point cannot be replaced and is filled instead, `config.json` last, because a checkpoint without it is not taken for
    complete. Raises LyapunovPruneError when the target exists and is not empty, or the disk refuses; that message ends
    with `remedy`.
    """
    require_empty(target)
    target = Path(target).resolve()  # "." has no name, and a link cannot be replaced by a folder
    with folder_beside(target, remedy) as temporary:
        yield temporary
        _open_as_folder(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        _put(temporary, target)
        _sync(target.parent)


@contextmanager
def whole_file(target: str | Path) -> Iterator[Path]:
    """A path with the name of `target` in a temporary folder next to it, for a large file: `whole_folder` of one file.

    Raises LyapunovPruneError if the target exists or the disk refuses.
    """
    require_empty(target, folder=False)
    target = Path(target).absolute()
    with folder_beside(target) as temporary:
        yield temporary / target.name
        _open_as_folder(temporary)
        _sync(temporary / target.name)
        require_empty(target, folder=False)  # another process may have written it
        os.replace(temporary / target.name, target)
        _sync(target.parent)


@contextmanager
def flushing(path: Path) -> Iterator[None]:
    """Flush the file at `path` to the disk while the block runs; waits at the end."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_sync, path)
        yield


@contextmanager
def folder_beside(target: Path, remedy: str = RETRY) -> Iterator[Path]:
    """A temporary folder next to `target`, removed at the end, with the leftovers of killed processes."""
    temporary = target.parent / f".{target.name}{_PARTIAL}{secrets.token_hex(_RANDOM_BYTES)}"
    lock = FileLock(f"{temporary}.lock", timeout=0)
    try:
        with reported(f"cannot write beside {target}", "choose another place"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_dead(target)
            try:
                lock.acquire()
            except NotImplementedError:  # a file system without locks: leftovers stay
                Path(lock.lock_file).unlink(missing_ok=True)
            temporary.mkdir()
        yield temporary
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and "(os error " not in str(error):  # from tokenizers
            raise
        reason = reason_of(error)
        if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST):
            reason, remedy = "another process has filled it meanwhile", "choose another --output"
        elif _TOO_LARGE in str(reason):
            remedy = "the disk or a limit takes no file so large; choose another place"
        raise LyapunovPruneError(f"writing {target} failed: {reason}; nothing of this run is there, {remedy}") from None
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
    """Move the contents of `temporary` into the empty folder `target`, all or nothing unless killed."""
    target.mkdir(exist_ok=True)
    require_empty(target)
    with ExitStack() as undo:
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            undo.callback(delete, moved := target / path.name)
            shutil.move(path, moved)
            _sync(moved)
        _sync(target)
        undo.pop_all()


def delete(path: Path) -> None:
    """Delete the file or folder at `path`; of a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def halves(folder: Path, name: str) -> list[Path]:
    """Temporary folders and locks of `whole_folder` in `folder`, for targets whose name matches the regex `name`."""
    temporary = re.compile(rf"\.(?:{name}){re.escape(_PARTIAL)}[0-9a-f]{{{2 * _RANDOM_BYTES}}}(\.lock)?")
    return [path for path in folder.glob(f".*{_PARTIAL}*") if temporary.fullmatch(path.name)]


def _remove_dead(target: Path) -> None:
    """Remove leftovers of dead processes next to `target`, whose locks are free."""
    for path in halves(target.parent, re.escape(target.name)):
        lock = FileLock(f"{path}.lock", timeout=0)
        if path.is_dir() and Path(lock.lock_file).exists():  # without a lock the owner is unknown
            with suppress(Timeout, OSError, NotImplementedError):
                lock.acquire()
                shutil.rmtree(path, ignore_errors=True)
                release_lock(lock)


def release_lock(lock: FileLock) -> None:
    """Delete the file of a `lock` that is held, then release it.

    In this order no two processes hold one lock: a process that waits on the deleted file notices that it is gone and
    opens the new one (filelock checks this since 3.21).
    """
    if lock.is_locked:
        with suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _sync(path: Path) -> None:
    """Flush the contents of `path` to the disk, or the names in a folder, where the system can."""
    with suppress(PermissionError, IsADirectoryError):  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_as_folder(folder: Path) -> None:
    """Give the files in `folder` the permissions of the umask, because safetensors makes them private."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def folder_digest(folder: str | Path) -> str:
    """SHA-256 over names, sizes and times of the files in `folder`, which changes with any change there."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        # Reading a folder changes its times, so they are left out.
        stamp = (status.st_size, status.st_mtime_ns) if path.is_file() else ()
        digest.update(repr((path.relative_to(folder).as_posix(), *stamp)).encode())
    return digest.hexdigest()


def require_empty(target: str | Path, *, folder: bool = True) -> None:
    """Raise LyapunovPruneError unless `target` is absent or an empty folder, and a folder can be put there.

    Without `folder`, unless it is absent and a file can be put there.
    """
    target = Path(target)
    require_writable(target.parent)
    why = ""
    try:
        if not folder:
            why = "exists" if os.path.lexists(target) else ""
        elif os.fspath(target.resolve()).encode() and target.is_file():  # libraries need a decodable path
            why = "is a file, and a folder is written"
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            why = "exists and is not empty"
        if not why and len(target.resolve().name.encode("utf-8", "replace")) > _LONGEST_NAME:
            why = "is too long a name"
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, undecodable
        why = f"cannot be written: {getattr(error, 'strerror', None) or error}"
    if why:
        raise LyapunovPruneError(f"{str(target)[:200]} {why}; choose another --output, or make room there")


def require_disk(folder: str | Path, needed: int, what: str, remedy: str = "choose another place") -> None:
    """Raise LyapunovPruneError, ending with `remedy`, unless the disk of `folder` has `needed` bytes free.

    The folder need not exist yet.
    """
    folder = Path(folder).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        raise LyapunovPruneError(
            f"{what} need {needed:,} bytes of disk in {folder} and {free:,} are free; free some, or {remedy}"
        )


def _require_own_rights() -> None:
    """Raise LyapunovPruneError for a umask that takes read or write permission from the owner."""
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    if mask & 0o700:
        raise LyapunovPruneError(f"the umask is {mask:03o}: you could not open what is written; set another, as 022")


def require_writable(folder: str | Path, remedy: str = "give another --output") -> None:
    """Raise LyapunovPruneError, ending with `remedy`, unless files can be written in `folder`, existing or not."""
    folder = Path(folder)
    _require_own_rights()
    for place in (folder, *folder.parents):
        try:
            usable = stat.S_ISDIR(os.stat(place).st_mode)
            why = "" if usable else f"{place} is no folder"
            if usable and not os.access(place, os.W_OK | os.X_OK):
                why = f"{place} is not yours to write"
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            why = str(getattr(error, "strerror", None) or error)
        if why:
            raise LyapunovPruneError(f"cannot write in {str(folder)[:200]}: {why}; {remedy}")
        return
