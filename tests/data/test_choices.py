"""Items of multiple choice: what a file must hold, and where the tokens of a choice begin."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.data import ChoiceItem, load_items
from lyapunov_prune.data.choices import read_task, tokenize

GOOD = {"query": "Which?", "choices": ["one", "two"], "gold": 1}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "items.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def test_items_come_from_a_file(tmp_path: Path) -> None:
    more = {"query": "a\u2028b", "choices": ["x", "y", "z"], "gold": 0, "ind": 7}
    found = load_items(written(tmp_path, GOOD, "", json.dumps(more, ensure_ascii=False), ""))
    assert found == (ChoiceItem("Which?", ("one", "two"), 1), ChoiceItem("a\u2028b", ("x", "y", "z"), 0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no item"),
        ([1], "line 2 is no item"),
        ({"context_options": ["a", "b"], "continuation": "c", "gold": 1}, "line 2 is no item"),
        ({**GOOD, "query": 3}, "line 2 is no item"),
        ({**GOOD, "query": ""}, "line 2 is no item"),
        ({**GOOD, "choices": "one"}, "line 2 is no item"),
        ({**GOOD, "choices": ["one", ""]}, "line 2 is no item"),
        ({**GOOD, "choices": ["one", None]}, "line 2 is no item"),
        ({**GOOD, "choices": ["one"], "gold": 0}, "line 2 is no item"),
        ({**GOOD, "gold": 2}, "line 2 is no item"),
        ({**GOOD, "gold": -1}, "line 2 is no item"),
        ({**GOOD, "gold": True}, "line 2 is no item"),
        ({**GOOD, "gold": "1"}, "line 2 is no item"),
    ],
    ids=str,
)
def test_a_bad_line_is_named(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        load_items(written(tmp_path, GOOD, line))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="cannot read"):
        load_items(tmp_path / "absent.jsonl")
    with pytest.raises(LyapunovPruneError, match="is no item"):
        load_items(written(tmp_path, "", ""))


TOKENIZERS = {bos: make_tokenizer(adds_bos=bos) for bos in (False, True)}
TEXT = st.text("th aé\n", min_size=1, max_size=12)


@settings(max_examples=200)
@given(TEXT, st.lists(TEXT, min_size=2, max_size=4, unique=True), st.booleans())
def test_rows_are_the_texts_and_share_their_context(query: str, choices: list[str], bos: bool) -> None:
    tokenizer = TOKENIZERS[bos]
    ids, lengths, context = tokenize(ChoiceItem(query, tuple(choices), 0), tokenizer)
    joint = "" if query[-1].isspace() else " "
    rows = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    for row, choice in zip(rows, choices, strict=True):
        assert row[0] == 1 or not bos
        assert tokenizer.decode(row[bos:]) == query + joint + choice
        assert len(row) > context >= 1
        assert (query + joint + choice).startswith(tokenizer.decode(rows[0][bos:context]))
    assert len({tuple(row[:context]) for row in rows}) == 1
    assert all((row[length:] == row[length - 1]).all() for row, length in zip(ids, lengths, strict=True))
    assert len(tokenizer.decode(rows[0][bos:context])) <= len(query)


def test_a_token_may_reach_over_the_end_of_the_query(tokenizer: PreTrainedTokenizerFast) -> None:
    """`th` is one token: where the query ends in `t` it stays the query's, and is not where it does not."""
    ids, _, context = tokenize(ChoiceItem("a\nt ", ("h", "x"), 0), tokenizer)
    assert tokenizer.decode(ids[0, :context]) == "a\nt "
    joined = ChoiceItem("\n", ("th", "x"), 0)
    ids, lengths, context = tokenize(joined, tokenizer)
    assert (context, lengths) == (1, [2, 2])


def test_choices_of_the_same_tokens_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(LyapunovPruneError, match="'Which'"):
        tokenize(ChoiceItem("Which", ("one", "one"), 0), tokenizer)


def test_a_choice_that_is_the_start_of_another_leaves_nothing_to_score(tokenizer: PreTrainedTokenizerFast) -> None:
    """A row that ends where the shared tokens do has no token of its own."""
    with pytest.raises(LyapunovPruneError, match="to tell its choices"):
        tokenize(ChoiceItem("a ", ("", "b"), 0), tokenizer)
    ids, lengths, context = tokenize(ChoiceItem("a", ("b", "bc"), 0), tokenizer)
    assert (lengths, context) == ([3, 4], 1)
    assert ids[0].tolist() == [*ids[0, :3].tolist(), ids[0, 2]]


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
def test_a_bad_line_of_a_task_is_named(good: Any, line: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=told) as caught:
        read_task(write(tmp_path / "t.jsonl", good, line))
    assert "line 4 " in str(caught.value)


def test_gold_may_be_the_first_and_a_number_negative(tmp_path: Path) -> None:
    assert read_task(write(tmp_path / "a.jsonl", {**BLANK, "gold": 0})).items[0]["gold"] == 0
    read_task(write(tmp_path / "b.jsonl", {**QUESTION, "answer": "#### -1,000.5 \n"}))


def test_a_task_file_that_is_none_is_refused(tmp_path: Path) -> None:
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
