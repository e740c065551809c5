"""A retrieval task from its files, against the lines that were written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from lyapunov_prune.data.retrieval import load_retrieval
from lyapunov_prune.errors import LyapunovPruneError


def write(folder: Path, judged: str) -> tuple[Path, Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "queries": [{"_id": 1, "text": "what is cold"}, {"_id": "q2", "text": "why"}, {"_id": "q3", "text": "who"}],
        "corpus": [{"_id": "a", "title": "Ice", "text": "melts"}, {"_id": "b", "title": "", "text": "stone"}],
    }
    paths = []
    for name, rows in texts.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    paths.append(folder / "qrels" / "test.tsv")
    paths[-1].parent.mkdir(exist_ok=True)
    paths[-1].write_text(f"query\tdocument\tgrade\n{judged}", encoding="utf-8")
    return paths[0], paths[1], paths[2]


def test_answers_are_what_is_graded_above_zero(tmp_path: Path) -> None:
    queries, corpus, judged = write(tmp_path / "made", "1\ta\t1\n1\tb\t-1\nq2\tb\t0\nq3\tb\t3\n")
    task = load_retrieval(queries, corpus)
    assert task.name == "made"
    assert task.queries == {"1": "what is cold", "q3": "who"}
    assert task.documents == {"a": "Ice melts", "b": "stone"}
    assert task.relevant == {"1": {"a": 1, "b": -1}, "q3": {"b": 3}}
    content = b"".join(path.read_bytes() for path in (queries, corpus, judged))
    assert task.sha256 == hashlib.sha256(content).hexdigest()
    assert load_retrieval(queries, corpus, judged) == task


@pytest.mark.parametrize(
    ("judged", "told"),
    [
        ("1\ta\n", "line 2 .*grade"),
        ("1\ta\t1\t1\n", "line 2 .*grade"),
        ("1\ta\t1\n1\tb\tmuch\n", "line 3 .*grade"),
        ("1\tz\t1\n", "line 2 .*z"),
        ("q9\ta\t1\n", "line 2 .*q9"),
        ("1\ta\t0\nq2\tb\t-2\n", "no query an answer"),
        ("", "no query an answer"),
    ],
)
def test_a_judgement_that_is_none_is_named(judged: str, told: str, tmp_path: Path) -> None:
    queries, corpus, _ = write(tmp_path, judged)
    with pytest.raises(LyapunovPruneError, match=told):
        load_retrieval(queries, corpus)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"_id": 1}',
        '{"text": "a"}',
        '{"_id": 1, "text": "", "title": ""}',
        '{"_id": 1, "text": ' + "[" * 100_000,
        '{"_id": 1, "text": "half \\udc00 of a pair"}',
    ],
)
def test_a_line_that_is_no_text_is_named(line: str, tmp_path: Path) -> None:
    queries, corpus, _ = write(tmp_path, "1\ta\t1\n")
    corpus.write_text(corpus.read_text().rstrip("\n") + "\n" + line, encoding="utf-8")
    with pytest.raises(LyapunovPruneError, match="line 3 is no text"):
        load_retrieval(queries, corpus)
    corpus.write_text('{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n')
    with pytest.raises(LyapunovPruneError, match=r'line 2 .*"a"'):
        load_retrieval(queries, corpus)
