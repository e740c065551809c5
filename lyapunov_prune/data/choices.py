"""Multiple-choice items: reading and tokenising them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.batch import filled
from lyapunov_prune.data.lines import items_of, text_of
from lyapunov_prune.data.text import adds_bos
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.tokenizers import token_ids

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
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


@checked
def lettered(item: ChoiceItem) -> ChoiceItem:
    """The item with its choices listed in the query, one per line, and their letters as answers: one token decides.

    Raises LyapunovPruneError if there are more choices than letters.
    """
    letters = tuple(_LETTERS[: len(item.choices)])
    if len(letters) < len(item.choices):
        raise LyapunovPruneError(f"{len(item.choices)} choices are more than the letters A to Z; ask by their texts")
    lines = [item.query.rstrip(), *(f"{a}. {text}" for a, text in zip(letters, item.choices, strict=True)), "Answer:"]
    return ChoiceItem("\n".join(lines), letters, item.gold)


def tokenize(item: ChoiceItem, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, list[int], int]:
    """Ids (choices × tokens), the length of each row, and the number of tokens that all rows share at the start.

    Short rows are filled with their last token (`batch.filled`).
    """
    texts = [item.stem + choice for choice in item.choices]
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
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
