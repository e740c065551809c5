"""Text files of others, and their lines of JSON: what is no text is a ValueError, and a pipe is not waited for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lyapunov_prune.results.files import parsed, require_file

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_bytes(path: str | Path) -> bytes:
    """What the file `path` holds; raises OSError, and LyapunovPruneError for what is no file."""
    require_file(path)
    return Path(path).read_bytes()


def parsed_line(line: str) -> Any:
    """What a line of JSON says. Raises ValueError also for half of a surrogate pair, which no tokenizer takes."""
    value = parsed(line)
    if _SURROGATE.search(line):  # both halves are one character
        json.dumps(value, ensure_ascii=False).encode()
    return value
