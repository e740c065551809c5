"""Read text files and their lines of JSON: invalid JSON raises ValueError, and pipes are refused."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lyapunov_prune.arguments import fits
from lyapunov_prune.errors import LyapunovPruneError, like_named, reported
from lyapunov_prune.results.files import parsed, require_file

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(path: str | Path, remedy: str) -> str:
    """The text of a UTF-8 file, gzipped or not, without a byte-order mark; every line ends in a newline character.

    Raises LyapunovPruneError, with the reason and `remedy`, if it cannot be read.
    """
    require_file(path)
    with reported(f"cannot read {path}{like_named(path)}", remedy, OSError, EOFError, zlib.error, UnicodeDecodeError):
        content = Path(path).read_bytes()
        if Path(path).suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def numbered(path: str | Path, text: str) -> list[tuple[str, str]]:
    """The non-blank lines of `text`, the content of `path`, each with its position in words."""
    lines = enumerate(text.split("\n"), start=1)  # splitlines() would also split at U+2028 inside a string
    return [(f"{path} line {number}", line) for number, line in lines if line.strip()]


def items_of(
    path: str | Path, text: str, fields: Mapping[str, Any], form: str, holds: Callable[..., bool]
) -> list[dict[str, Any]]:
    """The `fields`, given with their types, of the object in each line of `text`, the content of `path`.

    Raises LyapunovPruneError, with the line number and the `form`, for a line without them or for which `holds` is
    false, and for a file without lines.
    """
    lines = numbered(path, text)
    found = [_item(line, fields, holds) for _, line in lines]
    if not found or not all(found):
        bad = (place for place, item in zip(lines, found, strict=True) if not item)
        where, line = next(bad, (str(path), "it is empty"))
        raise LyapunovPruneError(f"{where} is no item, {line.strip()[:60]}; give {form} a line")
    return found


def _item(line: str, fields: Mapping[str, Any], holds: Callable[..., bool]) -> dict[str, Any]:
    """The `fields` of a line; empty if it is no item."""
    try:
        data = parsed_line(line)
        item = {name: data[name] for name in fields}
    except (ValueError, KeyError, TypeError):
        return {}
    return item if all(fits(item[name], kind) for name, kind in fields.items()) and holds(**item) else {}


def parsed_line(line: str) -> Any:
    """The value of a line of JSON. Raises ValueError also for half of a surrogate pair, which tokenizers reject."""
    value = parsed(line)
    if _SURROGATE.search(line):  # a complete pair is one character and encodes
        json.dumps(value, ensure_ascii=False).encode()
    return value
