"""Text files and their lines, and rows of JSON files, tables and hub data sets, each as a dictionary.

Invalid JSON raises ValueError, and pipes are refused.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lyapunov_prune.arguments import fits
from lyapunov_prune.errors import LyapunovPruneError, like_named, reported, require_extra
from lyapunov_prune.results.files import parsed, require_file
from lyapunov_prune.results.frames import pd

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


JSON = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t", ".parquet": None, ".arrow": None, ".feather": None}
ENCODING = f"convert it to UTF-8, or give it its own ending ({', '.join((*JSON, *TABLES))})"


@dataclass(frozen=True)
class Rows:
    """The rows of `source`: its columns (in JSON those of the first row), and each row with its position.

    `read` takes the names of the wanted columns, so that a table reads no others.
    """

    source: str
    columns: tuple[str, ...]
    read: Callable[[list[str]], Iterable[tuple[str, dict[str, Any]]]]


def format_of(path: Path) -> str:
    """The suffix that decides how a file is read; for `.gz` the one before it."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def holds_rows(path: Path) -> bool:
    return format_of(path) in (*JSON, *TABLES)


def require_reader(path: Path) -> None:
    """Raise LyapunovPruneError for a table that needs pyarrow if that is not installed."""
    if TABLES.get(format_of(path), "") is None:
        require_extra("pyarrow", "data", f"reading {path}")


def file_rows(path: Path) -> Rows:
    """The rows of a file of JSON lines, of a JSON list, or of a table; raises LyapunovPruneError for other files."""
    require_reader(path)
    if format_of(path) in TABLES:
        return _table(path)
    found = list(_json_rows(path, text_of(path, ENCODING)))
    for where, row in found:
        if not isinstance(row, dict):
            raise LyapunovPruneError(f'{where} is no JSON object; give {{"text": "…"}} a line')
    columns = tuple(found[0][1]) if found else ()
    return Rows(str(path), columns, lambda names: found)


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if format_of(path) == ".json":
        try:
            value = parsed_line(text)
        except ValueError:
            pass  # files of JSON lines may be called .json too
        else:
            rows = value if isinstance(value, list) else [value]
            yield from ((f"{path} item {number}", row) for number, row in enumerate(rows, start=1))
            return
    for where, line in numbered(path, text):
        value = None
        with suppress(ValueError):
            value = parsed_line(line)
        yield where, value


def _table(path: Path) -> Rows:
    kind = format_of(path)
    separator = TABLES[kind]
    failures = OSError, EOFError, zlib.error, ValueError  # errors of pyarrow and pandas are ValueErrors
    with reported(f"cannot read {path} as a {kind} file", "give it whole, or with its own ending", *failures):
        if separator is not None:
            frame = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
            return _counted(path, list(map(str, frame.columns)), lambda names: frame[names].to_dict("records"))
        from pyarrow import ArrowInvalid, ipc, memory_map, parquet

        if kind == ".parquet":
            table = parquet.read_table(path, memory_map=True)
        else:  # Arrow's file format (also Feather), or its stream format, which `datasets` saves
            try:
                table = ipc.open_file(memory_map(str(path))).read_all()
            except ArrowInvalid:
                table = ipc.open_stream(memory_map(str(path))).read_all()
        return _counted(path, table.column_names, lambda names: table.select(names).to_pylist())


def _counted(path: Path, columns: list[str], read: Callable[[list[str]], list[dict[str, Any]]]) -> Rows:
    def rows(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((f"{path} row {number}", _own(row)) for number, row in enumerate(read(names), start=1))

    return Rows(str(path), tuple(columns), rows)


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the fields that Arrow adds with None because another row has them: those inside of its entries."""
    return {name: _filled(value, outside=True) for name, value in row.items()}


def _filled(value: Any, *, outside: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if outside or each is not None}
    return [_filled(each, outside=outside) for each in value] if isinstance(value, list) else value


def hub_rows(source: str) -> Rows:
    """The rows of the hub data set `name[:config[:split]]`; the split is `test` by default."""
    name, _, rest = source.partition(":")
    config, _, part = rest.partition(":")
    require_extra("datasets", "data", f"{source} is no local file, and a hub data set")
    from datasets import load_dataset

    remedy = "check the name and the network, or give a file"
    with reported(f"cannot load the data set {source}", remedy, Exception):  # many kinds: network, name, format
        data: Any = load_dataset(name, config or None, split=part or "test")

    def rows(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, values in enumerate(zip(*(data[name] for name in names), strict=True), start=1):
            yield f"{source} row {number}", _own(dict(zip(names, values, strict=True)))

    return Rows(source, tuple(data.column_names), rows)
