"""Task files: three kinds of items, told apart by the first line, against what was written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lyapunov_prune.data.tasks import read_task
from lyapunov_prune.errors import LyapunovPruneError

CHOICE = {"query": "Which?", "choices": ["one", "two"], "gold": 1}
BLANK = {"context_options": ["Ann", "Bob"], "continuation": "ran.", "gold": 1}
QUESTION = {"question": "2 + 2?", "answer": "Four.\n#### 4"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n" + "\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "kind", "item"),
    [
        (CHOICE, "multiple choice", {**CHOICE, "query": "Which? "}),
        (BLANK, "partial", BLANK),
        (QUESTION, "generation", QUESTION),
    ],
)
def test_the_first_line_says_the_kind(row: Any, kind: str, item: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {**row, "more": 7}, row)
    task = read_task(path)
    assert (task.path, task.kind, task.items) == (path, kind, (item, item))
    assert task.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("good", "line", "told"),
    [
        (BLANK, "{", "is no item"),
        (BLANK, {**BLANK, "context_options": "Ann"}, "is no item"),
        (BLANK, {**BLANK, "context_options": ["Ann", " "]}, "is no item"),
        (BLANK, {**BLANK, "continuation": ""}, "is no item"),
        (BLANK, {**BLANK, "continuation": 3}, "is no item"),
        (BLANK, {**BLANK, "context_options": ["Ann"], "gold": 0}, "is no item"),
        (BLANK, {**BLANK, "context_options": ["Ann", "Bob", "Ann"]}, "is no item"),
        (BLANK, {**BLANK, "gold": 2}, "is no item"),
        (BLANK, {**BLANK, "gold": -1}, "is no item"),
        (BLANK, {**BLANK, "gold": True}, "is no item"),
        (QUESTION, {"question": "", "answer": "#### 4"}, "is no item"),
        (QUESTION, {"question": "a", "answer": 4}, "is no item"),
        (QUESTION, {"question": 4, "answer": "#### 4"}, "is no item"),
        (QUESTION, [1], "is no item"),
        (QUESTION, {**QUESTION, "answer": "Four."}, "is no item"),
        (QUESTION, {**QUESTION, "answer": "#### 4 apples"}, "is no item"),
    ],
    ids=str,
)
def test_a_bad_line_is_named(good: Any, line: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=told) as caught:
        read_task(write(tmp_path / "t.jsonl", good, line))
    assert "line 4 " in str(caught.value)


def test_gold_may_be_the_first_and_a_number_negative(tmp_path: Path) -> None:
    assert read_task(write(tmp_path / "a.jsonl", {**BLANK, "gold": 0})).items[0]["gold"] == 0
    read_task(write(tmp_path / "b.jsonl", {**QUESTION, "answer": "#### -1,000.5 \n"}))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"cannot read .*: No such file"):
        read_task(tmp_path / "absent.jsonl")
    (tmp_path / "items.jsonl").write_bytes(b'{"query": "\xff')
    with pytest.raises(LyapunovPruneError, match="byte 11 is not UTF-8"):
        read_task(tmp_path / "items.jsonl")
    with pytest.raises(LyapunovPruneError, match=r"did you mean .*items\.jsonl\?"):
        read_task(tmp_path / "itmes.jsonl")
    for empty in ("", "\n \n"):
        (tmp_path / "empty.jsonl").write_text(empty)
        with pytest.raises(LyapunovPruneError, match="is no item"):
            read_task(tmp_path / "empty.jsonl")
