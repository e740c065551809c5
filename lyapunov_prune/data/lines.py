"""Text files of others, and their lines of JSON: what is no JSON is a ValueError, and a pipe is not waited for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.files import like_named, parsed, require_file

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(path: str | Path, remedy: str) -> str:
    """The text of a file in UTF-8, without a byte-order mark.

    Raises LyapunovPruneError for what cannot be read, with the reason and `remedy`.
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
    """Where it stands, and the line: of all lines of `text`, which is what `path` holds, that are not blank."""
    lines = enumerate(text.split("\n"), start=1)  # splitlines() would cut at U+2028 inside a string
    return [(f"{path} line {number}", line) for number, line in lines if line.strip()]


def parsed_line(line: str) -> Any:
    """What a line of JSON says. Raises ValueError also for half of a surrogate pair, which no tokenizer takes."""
    value = parsed(line)
    if _SURROGATE.search(line):  # both halves are one character
        json.dumps(value, ensure_ascii=False).encode()
    return value
