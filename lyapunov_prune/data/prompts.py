"""A file of prompts as token ids, each of its own length, optionally through the chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.batch import TokenBatch, filled
from lyapunov_prune.data.documents import Chat, beside, chat_of, columns_of, require_template
from lyapunov_prune.data.rows import file_rows, holds_rows, numbered, text_of
from lyapunov_prune.data.text import begins_with_bos
from lyapunov_prune.errors import LyapunovPruneError


@dataclass(frozen=True)
class Prompts(TokenBatch):
    """Prompts of different lengths: row `i` holds `lengths[i]` ids, then its last id repeated.

    Models never see the repeated ids: `windows` returns prompts of equal length without them. `said` holds the strings
    of each prompt without the chat template; it is empty if only ids were given.
    """

    lengths: tuple[int, ...]
    said: tuple[tuple[str, ...], ...] = ()

    def windows(self, batch_size: int) -> list[torch.Tensor]:
        """The prompts in order, in batches of at most `batch_size` prompts of equal length."""
        parts, start = [], 0
        for length, run in groupby(self.lengths):
            end = start + len(list(run))
            parts += self.ids[start:end, :length].split(batch_size)
            start = end
        return parts

    def item(self, index: int) -> torch.Tensor:
        return self.ids[index, : self.lengths[index]]

    def take(self, indices: Sequence[int]) -> Prompts:
        rows = torch.tensor(indices, dtype=torch.int64)
        said = tuple(self.said[i] for i in indices) if self.said else ()
        return replace(self, ids=self.ids[rows], lengths=tuple(self.lengths[i] for i in indices), said=said)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def text_hash(self) -> str:
        return hashlib.sha256(str(self.lengths).encode() + self._own.tobytes()).hexdigest()

    @property
    def stream(self) -> np.ndarray:
        begins = np.cumsum((0, *self.lengths[:-1]), dtype=np.int64)
        return np.delete(self._own, begins) if self.bos else self._own

    @property
    def _own(self) -> np.ndarray:
        return torch.cat([self.item(i) for i in range(len(self))]).to("cpu", torch.int64).numpy()


@checked
def load_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, chat: bool | None = None, bos: bool | None = None
) -> Prompts:
    """The prompts in a file of rows (`.jsonl`, `.parquet`, as in `load_text`) with a `text`, or of plain text lines.

    With `chat` each is a user's message in the tokenizer's chat template, which also decides about BOS; rows with
    `messages` or `conversations` are written with their tools and without their last answer. If `chat` is None, such
    rows are chats and plain text is not. Without chats, a BOS token is put in front if `bos`; None follows the
    tokenizer.

    Raises LyapunovPruneError for a file without prompts or of another form, a prompt of fewer than two tokens, a BOS
    token or chat template that the tokenizer lacks, and for `bos` with `chat`.
    """
    prompts = _read(Path(path))
    chats = [where for where, asked in prompts if not isinstance(asked, str)]
    if chat is None:
        chat = bool(chats)
    if (chat and bos is not None) or (chats and not chat):
        raise LyapunovPruneError(
            f"{chats[0] if chats else path} is written by the chat template, which decides how a text begins; leave "
            "out bos and chat=False"
        )
    if chat:
        require_template(tokenizer, str(path))
    begins = not chat and begins_with_bos(tokenizer, bos)
    rows, said = [], []
    for where, asked in prompts:
        if chat:
            if isinstance(asked, str):
                asked = Chat(where, [{"role": "user", "content": asked}])
            text = asked.text(tokenizer, answer=True)
        else:
            assert isinstance(asked, str)  # chats are not given with chat=False
            text = asked
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        rows.append([tokenizer.bos_token_id] * begins + ids)
        said.append((asked,) if isinstance(asked, str) else tuple(asked.said))
    short = next((where for (where, _), row in zip(prompts, rows, strict=True) if len(row) < 2), None)
    if short or not rows:
        what = f"{short} is a prompt of fewer than two tokens" if short else f"{path} holds no prompts"
        raise LyapunovPruneError(f'{what}; give longer ones, one a line, or a .jsonl of {{"text": "…"}}')
    if chat:
        begins = tokenizer.bos_token_id is not None and all(row[0] == tokenizer.bos_token_id for row in rows)
    lengths = tuple(map(len, rows))
    return Prompts(filled(rows), text=str(path), split="all", bos=begins, lengths=lengths, said=tuple(said))


def _read(path: Path) -> list[tuple[str, str | Chat]]:
    """Every prompt with its position: a text, or a chat before its last answer."""
    if not holds_rows(path):
        return list(numbered(path, text_of(path, "give a file of prompts")))
    rows = file_rows(path)
    name = columns_of(rows)[0]
    return [(where, _asked(where, row, name)) for where, row in rows.read([name, *beside(rows)])]


def _asked(where: str, row: dict[str, Any], name: str) -> str | Chat:
    value = row.get(name)
    if name != "text":
        chat = chat_of(where, row, name)
        asked = len(chat.messages)
        while asked and chat.messages[asked - 1]["role"] == "assistant":
            asked -= 1
        if asked:
            return replace(chat, messages=chat.messages[:asked])
    elif isinstance(value, str) and value.strip():
        return value
    raise LyapunovPruneError(f'{where} is no prompt; give {{"text": "…"}} a line')
