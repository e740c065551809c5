"""The same rows come out of every format, and what is no such file is refused in one line."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from lyapunov_prune.data.rows import file_rows, holds_rows
from lyapunov_prune.errors import LyapunovPruneError

ROWS = [{"text": "one\ntwo, “three”", "id": "1"}, {"text": "NA", "id": ""}, {"text": "", "id": "007"}]


def lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def separated(path: Path, mark: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=mark)
        writer.writeheader()
        writer.writerows(ROWS)


WRITTEN: dict[str, Callable[[Path], Any]] = {
    "x.jsonl": lines,
    "x.ndjson": lines,
    "lines.json": lines,
    "x.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
    "C4.JSON.gz": lambda path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
    "x.csv": lambda path: separated(path, ","),
    "x.tsv": lambda path: separated(path, "\t"),
    "x.parquet": lambda path: parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "x.arrow": arrow_stream,
    "x.feather": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_holds_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITTEN[name](tmp_path / name)
    assert holds_rows(tmp_path / name)
    rows = file_rows(tmp_path / name)
    assert rows.columns == ("text", "id")
    assert [row["text"] for _, row in rows.read(["text"])] == [row["text"] for row in ROWS]
    assert [row["id"] for _, row in rows.read(["id"])] == [row["id"] for row in ROWS]
    assert [where.rpartition(" ")[2] for where, _ in rows.read(["id"])] == ["1", "2", "3"]


# What of a .csv is missing nobody sees.
STRICT = [name for name in WRITTEN if name not in ("x.csv", "x.tsv")]


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("content", [b"\xff\x00\xfe" * 99, b"PAR1" * 9, b"\x1f\x8b\x08 cut"], ids=repr)
def test_what_is_no_such_file_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LyapunovPruneError, match=name) as raised:
        list(file_rows(tmp_path / name).read(["text"]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
@pytest.mark.parametrize("content", [b"\xff\x00\xfe", b"", b'"a', b"a\n1,2\n1,2,3\n1\t2\t3\n1\t2\n"])
def test_what_is_no_table_of_separated_values_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LyapunovPruneError, match=name) as raised:
        file_rows(tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", STRICT)
def test_half_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    WRITTEN[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 3])
    with pytest.raises(LyapunovPruneError, match=name) as raised:
        list(file_rows(tmp_path / name).read(["id"]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
def test_without_pyarrow_the_extra_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITTEN[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    with pytest.raises(LyapunovPruneError, match=r"lyapunov-prune\[data\]"):
        file_rows(tmp_path / name)
