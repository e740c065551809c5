"""Items of a local task file: two forms of multiple choice, or questions whose answer ends in a number."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lyapunov_prune.data.choices import load_items
from lyapunov_prune.data.lines import numbered, parsed_line, text_of
from lyapunov_prune.errors import LyapunovPruneError

Kind = Literal["multiple choice", "partial", "generation"]
_FORMS = (
    '{"query": "…", "choices": ["…", "…"], "gold": 0}, {"context_options": ["…", "…"], "continuation": "…", "gold": 0} '
    'or {"question": "…", "answer": "… #### 42"}'
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
        item = _blank if kind == "partial" else _question
        items = [item(line, where) for where, line in lines]
    if not items:
        raise LyapunovPruneError(f"{path} holds no items; give a line {_FORMS} for each")
    return TaskFile(path, kind, tuple(items), hashlib.sha256(content.encode()).hexdigest())


def _blank(line: str, where: str) -> dict[str, Any]:
    try:
        data = parsed_line(line)
        options, continuation, gold = data["context_options"], data["continuation"], data["gold"]
        texts = isinstance(options, list) and all(isinstance(t, str) and t.strip() for t in [*options, continuation])
    except (ValueError, KeyError, TypeError):
        texts = False
    if not texts:
        raise LyapunovPruneError(f"{where} is no item; give {_FORMS} a line")
    different = len(set(options))
    if different < max(2, len(options)) or type(gold) is not int or not 0 <= gold < different:
        raise LyapunovPruneError(
            f"{where} has {different} different context_options and gold {gold!r}; give two or more, and an index"
        )
    return {"context_options": options, "continuation": continuation, "gold": gold}


def _question(line: str, where: str) -> dict[str, Any]:
    try:
        data = parsed_line(line)
        question, answer = data["question"], data["answer"]
        texts = isinstance(question, str) and isinstance(answer, str) and bool(question.strip())
    except (ValueError, KeyError, TypeError):
        texts = False
    if not texts:
        raise LyapunovPruneError(f"{where} is no item; give {_FORMS} a line")
    if not _ENDS_IN_A_NUMBER.search(answer):
        raise LyapunovPruneError(f'{where} has an answer that does not end in "#### " and a number; add them')
    return {"question": question, "answer": answer}
