"""Read text files and their lines of JSON: invalid JSON raises ValueError, and pipes are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.files import like_named, parsed, require_file

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(path: str | Path, remedy: str) -> str:
    """The text of a UTF-8 file, without a byte-order mark.

    Raises LyapunovPruneError, with the reason and `remedy`, if it cannot be read.
    """
    require_file(path)
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    raise LyapunovPruneError(f"cannot read {path}{like_named(path)}: {reason}; {remedy}")


def numbered(path: str | Path, text: str) -> list[tuple[str, str]]:
    """The non-blank lines of `text`, the content of `path`, each with its position in words."""
    lines = enumerate(text.split("\n"), start=1)  # splitlines() would also split at U+2028 inside a string
    return [(f"{path} line {number}", line) for number, line in lines if line.strip()]


def parsed_line(line: str) -> Any:
    """The value of a line of JSON. Raises ValueError also for half of a surrogate pair, which tokenizers reject."""
    value = parsed(line)
    if _SURROGATE.search(line):  # a complete pair is one character and encodes
        json.dumps(value, ensure_ascii=False).encode()
    return value
