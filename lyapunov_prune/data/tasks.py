"""Items of a local task file: two forms of multiple choice, or questions whose answer ends in a number."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lyapunov_prune.data.choices import load_items
from lyapunov_prune.data.lines import items_of, numbered, text_of

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
