"""What the name of a text can be: builtin, code, a file, or a hub data set, and the column to read; without torch."""

from __future__ import annotations

import re
from pathlib import Path

from lyapunov_prune.data.rows import holds_rows, require_reader
from lyapunov_prune.errors import LyapunovPruneError, first_of, like_named

SELF = "self"  # text that the model writes
BUILTIN, CODE = OWN = ("builtin", "code")  # texts that are there wherever Python is, of two kinds: prose and code


def require_source(source: str) -> None:
    """Raise LyapunovPruneError if `source` is empty, a missing file, or names a column of a plain text.

    Files are not opened, so this can run before a model is loaded.
    """
    name, column = parts_of(source)
    path = Path(name)
    wrong = {
        f"no readable file{like_named(path)}; give builtin, code, a .txt, a .jsonl or a data set": (
            not path.is_file() and (not name.strip() or path.exists() or _names_file(name))
        ),
        f"a text without columns; leave out :{column}": (
            column is not None and (name in OWN or (path.is_file() and not holds_rows(path)))
        ),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{name or 'an empty name'} is {why}")
    require_reader(path)


def parts_of(source: str) -> tuple[str, str | None]:
    """The text named by `source`, and the column after its last colon: `FILE:COLUMN` or `name:config:split:COLUMN`."""
    name, _, column = source.rpartition(":")
    if Path(source).is_file() or not name:
        return source, None
    of_file = name in OWN or Path(name).is_file() or holds_rows(Path(name))
    return (name, column) if of_file or name.count(":") == 2 else (source, None)


def _names_file(source: str) -> bool:
    """Whether `source` looks like a file rather than a hub data set, `owner/name[:config[:split]]`."""
    if ":" in source:  # name.md:default gives a data set with a file-like name
        return False
    return source[0] in "./~" or source.count("/") > 1 or re.fullmatch(r"\.[A-Za-z]+", Path(source).suffix) is not None
