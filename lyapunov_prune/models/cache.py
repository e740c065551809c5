"""The cache of dequantised GGUF files: float32 checkpoints in a user folder, keyed by the content of each file.

The folder is `LYAPUNOV_PRUNE_CACHE`, or else `lyapunov-prune` in `XDG_CACHE_HOME` or `~/.cache`. The checkpoints take
at most `LYAPUNOV_PRUNE_CACHE_GB` gigabytes (default 20) in all; the least recently used are deleted first, and the most
recent is kept whatever its size. The built-in model lies in the same folder and does not count.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.progress import warn
from lyapunov_prune.results.files import delete, halves, release_lock, whole_folder

BUILTIN, BUILTIN_VERSION = "smollm2-135m", "0.1.2"
PLACE, LIMIT = "LYAPUNOV_PRUNE_CACHE", "LYAPUNOV_PRUNE_CACHE_GB"
_GIGABYTES = 20.0
READER = 2  # raised when a file is read otherwise, so that what older versions dequantised is not taken
_SEAL = "cached.json"
_ENTRY = "[0-9a-f]{64}-[0-9][^-]*-[0-9][^-]*"  # SHA-256 of a file, versions of what reads it
_VERSION = "[0-9.]+"
T = TypeVar("T")


def cache_folder() -> Path:
    """The cache's folder. Raises LyapunovPruneError if no variable names one and the user has no home."""
    if os.environ.get(PLACE):
        return Path(os.environ[PLACE])
    # RuntimeError: neither HOME nor an entry in the password database
    with reported("this user has no home folder for the cache", f"set {PLACE} to a folder", RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lyapunov-prune"


def builtin_place() -> Path:
    return cache_folder() / f"{BUILTIN}-{BUILTIN_VERSION}.{READER}"


def cache_limit() -> float:
    """The limit in bytes. Raises LyapunovPruneError if the variable is not a number of gigabytes."""
    told = os.environ.get(LIMIT) or str(_GIGABYTES)
    try:
        limit = float(told) * 1e9
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise LyapunovPruneError(f"{LIMIT} is {told!r}; give a number of gigabytes, 0 or more")
    return limit


class CacheEntry:
    """The cache entry for the dequantised file `source`, independent of the file's name and place.

    Its folder is named by the SHA-256 of the file and the versions of the packages that read it. Raises
    LyapunovPruneError if the file cannot be read or `cache_limit` is invalid.
    """

    def __init__(self, source: Path) -> None:
        self._source, self._limit = source.name, cache_limit()
        with reported(f"cannot read {source}", "check its permissions"):
            content = _sha256(source)
        self.folder = cache_folder() / "gguf" / f"{content}-{version('transformers')}-{version('gguf')}+{READER}"

    def read(self, read: Callable[[Path], T]) -> T | None:
        """Return `read(folder)` of the cached checkpoint; None if there is none or any byte of it has changed.

        The files are compared with their SHA-256 in parallel with `read`.
        """
        if not (self.folder / _SEAL).is_file():
            return None
        with ThreadPoolExecutor(1) as pool:
            sound = pool.submit(_is_sound, self.folder)
            try:
                found = read(self.folder)
            except Exception:
                if _is_sound(self.folder):  # otherwise another process may have deleted it
                    raise
                return None
            if not sound.result():
                return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(self.folder / _SEAL)
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A lock on this entry between processes, held for as long as the block runs."""
        lock = FileLock(self.folder.with_name(f"{self.folder.name}.lock"))
        with suppress(OSError):  # without a folder for the lock, `keep` fails too and warns
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            yield
        finally:
            release_lock(lock)

    def keep(self, save: Callable[[Path], None]) -> bool:
        """Let `save` write the checkpoint into the cache, whole; if that fails, warn and return False."""
        with suppress(OSError):
            delete(self.folder)
        try:
            with whole_folder(self.folder) as folder:
                save(folder)
                _seal(folder, self._source)
        except LyapunovPruneError as error:
            reason = str(error).partition(";")[0]
            warn(f"{reason}; {self._source} will be dequantised again next time, or name another folder in {PLACE}")
            return False
        _make_room(self.folder, self._limit)
        return True


@dataclass(frozen=True)
class Cached:
    """One checkpoint in the cache."""

    source: str  # name of the GGUF file when it was dequantised
    folder: Path
    size: int  # bytes; 0 for a link to another folder
    used: datetime


def cached() -> list[Cached]:
    """The cache's entries, most recently used first. Raises LyapunovPruneError if its path is not a folder."""
    place = cache_folder()
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not there.is_dir():
        raise LyapunovPruneError(f"{there} is not a folder, and the cache needs one; set {PLACE} to a folder")
    found = []
    for folder in [*_folders(), builtin_place()]:
        with suppress(OSError, ValueError, KeyError, TypeError):  # skip what another process is writing or deleting
            mark, source = folder / "config.json", BUILTIN
            if folder != builtin_place():
                mark = folder / _SEAL
                source = str(json.loads(mark.read_text(encoding="utf-8"))["source"])
            used = datetime.fromtimestamp(mark.stat().st_mtime, UTC)
            size = 0 if folder.is_symlink() else sum(file.stat().st_size for file in folder.iterdir())
            found.append(Cached(source, folder, size, used))
    return sorted(found, key=lambda each: each.used, reverse=True)


def clear_cache() -> None:
    """Delete what this module and the loading of the built-in model put into the cache folder, and nothing else.

    Links are deleted, not what they point to. Raises LyapunovPruneError if a file cannot be deleted.
    """
    place = cache_folder() / "gguf"
    locks = [path for path in place.glob("*.lock") if re.fullmatch(_ENTRY, path.stem)]
    left = [*halves(place, _ENTRY), *halves(cache_folder(), f"{re.escape(BUILTIN)}-{_VERSION}")]
    with reported(f"cannot empty {cache_folder()}", "delete it by hand"):
        for path in [*_folders(), *left, *locks, builtin_place()]:
            delete(path)
    with suppress(OSError):  # missing, or holds other files
        place.rmdir()


def _folders() -> list[Path]:
    place = cache_folder() / "gguf"
    return [folder for folder in place.glob("*") if re.fullmatch(_ENTRY, folder.name) and folder.is_dir()]


def _make_room(newest: Path, left: float) -> None:
    for each in cached():
        if each.folder != builtin_place():
            left -= each.size
            if left < 0 and each.folder != newest:
                with suppress(OSError):
                    delete(each.folder)
                left += each.size


def _seal(folder: Path, source: str) -> None:
    files = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    (folder / _SEAL).write_text(json.dumps({"source": source, "files": files}) + "\n", encoding="utf-8")


def _is_sound(folder: Path) -> bool:
    try:
        files = json.loads((folder / _SEAL).read_text(encoding="utf-8"))["files"]
        there = {file.name for file in folder.iterdir()} - {_SEAL}
        return there == files.keys() and all(_sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
