"""The text to tokenise: plain text, or chats written by the model's own template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.data.rows import Rows, parsed_line
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.tokenizers import chat_text

# A shorter repeated paragraph (a heading, a signature) does not count as a leak.
LEAK_CHARACTERS = 64
_PARAGRAPH_END = re.compile(r"(\n\s*\n)")
COLUMNS = ("text", "messages", "conversations")  # the first existing one is read
_ALPACA = ("instruction", "input", "output")
# ShareGPT's names for the roles of a chat template.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "observation": "tool"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Plain:
    """A plain text, and its name in results."""

    name: str
    content: str

    def halves(self) -> tuple[Plain, Plain]:
        """Cut at the first paragraph break after the middle, or else at a line break, or at a space."""
        middle = len(self.content) // 2
        for mark in ("\n\n", "\n", " "):
            position = self.content.find(mark, middle)
            if position != -1 and position < len(self.content) - len(self.content) // 4:
                middle = position + len(mark)
                break
        return replace(self, content=self.content[:middle]), replace(self, content=self.content[middle:])

    def held_out(self) -> tuple[Plain, Plain, Plain]:
        """The halves, and the second without paragraphs of the first."""
        first, second = self.halves()
        return first, second, replace(self, content=_without(second.content, _paragraphs(first.content)))

    def text(self, characters: int | None = None) -> str:
        """The first `characters`, or all."""
        return self.content[:characters]


@dataclass(frozen=True)
class Chats:
    """Chats, each with its position in the file, and a name for them in results.

    A message is a dictionary of `role`, `content` and whatever else the template knows. If a chat begins like one of
    `known`, it is written without that beginning.
    """

    name: str
    chats: tuple[tuple[str, list[Message]], ...]
    tokenizer: PreTrainedTokenizerBase
    known: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """Questions and answers, without system messages, which many chats share."""
        return "\n\n".join(text for _, chat in self.chats for text in _said([m for m in chat if m["role"] != "system"]))

    def halves(self) -> tuple[Chats, Chats]:
        """Cut between two chats, where about half of the text is on either side."""
        sizes = [sum(map(len, _said(chat))) for _, chat in self.chats]
        cut, left = 0, sum(sizes) / 2
        while cut < len(sizes) - 1 and left > sizes[cut] / 2:
            left -= sizes[cut]
            cut += 1
        return replace(self, chats=self.chats[:cut]), replace(self, chats=self.chats[cut:])

    def held_out(self) -> tuple[Chats, Chats, Chats]:
        """The halves, and the second without chats, paragraphs and the template's preamble that are in the first."""
        first, second = self.halves()
        chats = {tuple(_said(chat)) for _, chat in first.chats}
        seen = _paragraphs("\n\n".join(text for chat in chats for text in chat))
        left = []
        for where, chat in second.chats:
            new = [m | {"content": _without(m["content"], seen)} if _speaks(m) else m for m in chat]
            if tuple(_said(chat)) not in chats and any(text.strip() for text in _said(new)):
                left.append((where, new))
        # The template's preamble depends on whether the chat has a system message.
        begins = {chat[0]["role"]: (where, chat) for where, chat in reversed(first.chats)}
        known = tuple(replace(first, chats=tuple(begins.values()))._written())
        return first, second, replace(self, chats=tuple(left), known=known)

    def text(self, characters: int | None = None) -> str:
        """The first `characters` of the written chats in order, or all."""
        parts, count = [], 0
        for text in self._written():
            parts.append(text)
            count += len(text)
            if characters is not None and count >= characters:
                break
        return "".join(parts)[:characters]

    def _written(self) -> Iterator[str]:
        for where, chat in self.chats:
            text = chat_text(self.tokenizer, chat, where)
            same = max((_same_start(known, text) for known in self.known), default=0)
            yield text[same:] if same >= LEAK_CHARACTERS else text


def documents(rows: Rows, tokenizer: PreTrainedTokenizerBase, column: str | None = None) -> Plain | Chats:
    """The texts in `column` of the rows, or else in the first of these columns that exists.

    `text`: plain text, with a blank line between rows. `messages`, `conversations`: chats of `role` and `content`, or
    of `from` and `value` (ShareGPT). `instruction`, `input`, `output` (Alpaca): a chat of a question and its answer, or
    plain text if the tokenizer has no chat template.

    Raises LyapunovPruneError for other columns, for rows that hold anything else, and for chats without a template.
    """
    names = columns_of(rows, column)
    found = list(rows.read(names))
    if len(names) > 1:
        name = f"{rows.source} ({', '.join(names)}"
        if not tokenizer.chat_template:
            texts = ["\n\n".join(filter(None, _alpaca(where, row))) for where, row in found]
            return Plain(f"{name}, joined)", "\n\n".join(texts))
        chats = [(where, _question(*_alpaca(where, row))) for where, row in found]
        return Chats(f"{name}, by the chat template)", tuple(chats), tokenizer)
    name = names[0]
    if found and ((column is None and name != "text") or isinstance(found[0][1].get(name), list)):
        require_template(tokenizer, f"{rows.source} ({name})")
        chats = [(where, messages_of(where, row.get(name))) for where, row in found]
        return Chats(f"{rows.source} ({name}, by the chat template)", tuple(chats), tokenizer)
    texts = [_text(where, row, name) for where, row in found]
    return Plain(rows.source if name == "text" else f"{rows.source} ({name})", "\n\n".join(texts))


def require_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise LyapunovPruneError unless the chats of `source` can be written by a chat template."""
    if not tokenizer.chat_template:
        raise LyapunovPruneError(
            f"{source} is read as chats, and this tokenizer has no chat template; take an instruct model, or give "
            "plain text (FILE:COLUMN names a column)"
        )


def columns_of(rows: Rows, column: str | None = None) -> list[str]:
    """`column`, or else the first of `COLUMNS` that the rows have, or else those of Alpaca.

    Raises LyapunovPruneError for rows without them. Rows without any column, as of an empty file, have every one.
    """
    for name in COLUMNS if column is None else (column,):
        if name in rows.columns or not rows.columns:
            return [name]
    if column is None and {"instruction", "output"} <= set(rows.columns):
        return [name for name in _ALPACA if name in rows.columns]
    raise LyapunovPruneError(
        f"{rows.source} has no column {column or ', '.join(COLUMNS)} (it has {', '.join(rows.columns)}); name the one "
        f"to read behind a colon, as {rows.source}:COLUMN"
    )


def messages_of(where: str, value: object) -> list[Message]:
    """A chat in the format of chat templates, from a list of messages or its JSON.

    Raises LyapunovPruneError for anything else.
    """
    if isinstance(value, str):  # tables of text store lists as JSON
        with suppress(ValueError):
            value = parsed_line(value)
    messages = [_message(each) for each in value] if isinstance(value, list) else []
    if not messages or not all(messages):
        raise LyapunovPruneError(
            f'{where} holds no chat of texts with roles; give [{{"role": "user", "content": "…"}}, …] or '
            '[{"from": "human", "value": "…"}, …]'
        )
    return messages


def _message(message: object) -> Message:
    """`message` in the format of chat templates; empty if it is no text with a role."""
    # A table has all fields in every row; None marks a missing one.
    told = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role = told.pop("role", told.pop("from", None))
    content = told.pop("content", told.pop("value", None))
    if isinstance(content, list):  # parts, as for models that read pictures
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and "tool_calls" in told)):
        return {}
    return {"role": _ROLES.get(role, role), "content": content, **told}


def _text(where: str, row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise LyapunovPruneError(
            f"{where} has no string {name!r}; give one in every row, or name another column, as FILE:COLUMN"
        )
    return value


def _alpaca(where: str, row: dict[str, Any]) -> list[str]:
    return [_text(where, {name: ""} | row, name) for name in _ALPACA]


def _question(instruction: str, more: str, answer: str) -> list[Message]:
    asked = "\n\n".join(filter(None, (instruction, more)))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _speaks(message: Message) -> bool:
    return isinstance(message["content"], str)


def _said(chat: list[Message]) -> list[str]:
    return [message["content"] for message in chat if _speaks(message)]


def _same_start(one: str, other: str) -> int:
    """Number of leading characters that both share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _paragraphs(text: str) -> set[str]:
    return {part.strip() for part in _PARAGRAPH_END.split(text) if len(part) >= LEAK_CHARACTERS}


def _without(text: str, paragraphs: set[str]) -> str:
    return "".join(part for part in _PARAGRAPH_END.split(text) if part.strip() not in paragraphs)
