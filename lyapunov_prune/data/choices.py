"""Items of JSONL files: multiple choice, read and tokenised, and questions whose answer ends in a number."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.batch import filled
from lyapunov_prune.data.rows import items_of, numbered, text_of
from lyapunov_prune.data.text import start_ids
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.tokenizers import token_ids

_FORM = '{"query": "…", "choices": ["…", "…"], "gold": 0} (two choices or more, and the index of one)'


@dataclass(frozen=True)
class ChoiceItem:
    """A question, its possible answers, and the index of the right one."""

    query: str
    choices: tuple[str, ...]
    gold: int

    @property
    def stem(self) -> str:
        """The text in front of a choice: the query, with a space unless it ends in white space."""
        return self.query if self.query[-1].isspace() else f"{self.query} "


@checked
def load_items(path: str | Path) -> tuple[ChoiceItem, ...]:
    """The items in a JSONL file: one object per line with `query`, `choices` (two or more) and `gold` (from 0).

    Raises LyapunovPruneError, with the line number, for anything else, and for a file without items.
    """
    content = text_of(path, "give a .jsonl file of items")
    items = items_of(path, content, {"query": str, "choices": Sequence[str], "gold": int}, _FORM, _is_item)
    return tuple(ChoiceItem(item["query"], tuple(item["choices"]), item["gold"]) for item in items)


def _is_item(query: str, choices: Sequence[str], gold: int) -> bool:
    return all([query, *choices]) and 0 <= gold < len(choices) > 1


def tokenize(item: ChoiceItem, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, list[int], int]:
    """Ids (choices × tokens), the length of each row, and the number of tokens that all rows share at the start.

    Short rows are filled with their last token (`batch.filled`).
    """
    texts = [item.stem + choice for choice in item.choices]
    start = start_ids(tokenizer)
    rows = [start + token_ids(tokenizer, text) for text in texts]
    query = start + token_ids(tokenizer, item.query)
    # A choice may begin inside a token of the query, so the shared start is searched for.
    context = shared_start([query, *rows])
    if context == 0 or len({tuple(row) for row in rows}) < len(rows) or min(map(len, rows)) == context:
        raise LyapunovPruneError(
            f"the item {item.query[:40]!r} gives no tokens to tell its choices by; give choices of different tokens"
        )
    return filled(rows), [len(row) for row in rows], context


def shared_start(rows: Sequence[Sequence[int]]) -> int:
    """Number of tokens at the start that all rows have in common."""
    columns = enumerate(zip(*rows, strict=False))
    return next((place for place, column in columns if len(set(column)) > 1), min(map(len, rows)))


Kind = Literal["multiple choice", "partial", "generation"]
_FIELDS: dict[Kind, dict[str, Any]] = {
    "partial": {"context_options": Sequence[str], "continuation": str, "gold": int},
    "generation": {"question": str, "answer": str},
}
_FORMS = (
    '{"query": "…", "choices": ["…", "…"], "gold": 0}, {"context_options": ["…", "…"], "continuation": "…", "gold": 0} '
    'or {"question": "…", "answer": "… #### 42"} (two different choices or more, and the index of one)'
)
# The number that the strict match of lm-evaluation-harness' gsm8k looks for at the end of a text.
_ENDS_IN_A_NUMBER = re.compile(r"#### -?[0-9][0-9.,]*\s*\Z")


@dataclass(frozen=True)
class TaskFile:
    """The items of a file as lm-evaluation-harness takes them, and the SHA-256 of the file.

    Multiple choice: `query` (up to the choice), `choices`, `gold`. Partial, a choice among beginnings:
    `context_options`, `continuation` (after a space), `gold`. Generation: `question`, `answer`.
    """

    path: Path
    kind: Kind
    items: tuple[dict[str, Any], ...]
    sha256: str


def read_task(path: str | Path) -> TaskFile:
    """Read a JSONL file with one object per line, all of the kind of the first line.

    Raises LyapunovPruneError, with the line number, for anything else, for an answer that does not end in `#### ` and a
    number, and for a file without items.
    """
    path = Path(path)
    content = text_of(path, "give a .jsonl file of items")
    lines = numbered(path, content)
    kind: Kind
    first = lines[0][1] if lines else ""
    if '"choices"' in first:
        kind = "multiple choice"
        items = [{"query": i.stem, "choices": list(i.choices), "gold": i.gold} for i in load_items(path)]
    else:
        kind = "partial" if '"context_options"' in first else "generation"
        items = items_of(path, content, _FIELDS[kind], _FORMS, _is_partial if kind == "partial" else _is_question)
    return TaskFile(path, kind, tuple(items), hashlib.sha256(content.encode()).hexdigest())


def _is_partial(context_options: Sequence[str], continuation: str, gold: int) -> bool:
    texts = all(text.strip() for text in [*context_options, continuation])
    return texts and 0 <= gold < len(set(context_options)) == len(context_options) > 1


def _is_question(question: str, answer: str) -> bool:
    return bool(question.strip() and _ENDS_IN_A_NUMBER.search(answer))
