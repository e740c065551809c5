"""The text to tokenise: plain text, or chats written by the model's own template."""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.data.rows import Rows, parsed_line
from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models.tokenizers import chat_text

# A shorter repeated paragraph (a heading, a signature) does not count as a leak.
LEAK_CHARACTERS = 64
_PARAGRAPH_END = re.compile(r"(\n\s*\n)")
COLUMNS = ("text", "messages", "conversations")  # the first existing one is read
# What the template takes beside the messages of a row: tools, an instruction, values of its own (as TRL names them).
_TOOLS, _SYSTEM, _SETTINGS = _BESIDE = ("tools", "system", "chat_template_kwargs")
_ALPACA = ("instruction", "input", "output")
# ShareGPT's names for the roles of a chat template.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "observation": "tool"}

Message = dict[str, Any]


@dataclass(frozen=True)
class PlainText:
    """A plain text, and its name in results."""

    name: str
    content: str

    def halves(self) -> tuple[PlainText, PlainText]:
        """Cut at the first paragraph break after the middle, or else at a line break, or at a space."""
        middle = len(self.content) // 2
        for mark in ("\n\n", "\n", " "):
            position = self.content.find(mark, middle)
            if position != -1 and position < len(self.content) - len(self.content) // 4:
                middle = position + len(mark)
                break
        return replace(self, content=self.content[:middle]), replace(self, content=self.content[middle:])

    def held_out(self) -> tuple[PlainText, PlainText, PlainText]:
        """The halves, and the second without paragraphs of the first."""
        first, second = self.halves()
        return first, second, replace(self, content=_without(second.content, _paragraphs(first.content)))

    def text(self, characters: int | None = None) -> str:
        """The first `characters`, or all."""
        return self.content[:characters]


@dataclass(frozen=True)
class Chat:
    """A chat as chat templates take it, and its position `where` in the file.

    A message is a dictionary of `role`, `content` and whatever else the template knows. `settings` are the template's
    further arguments, among them `tools`, a list of JSON schemas.
    """

    where: str
    messages: list[Message]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> list[str]:
        """The content of the messages, and their tool calls as JSON."""
        return [text for message in self.messages for text in _said(message)]

    @property
    def tools(self) -> list[Any]:
        return self.settings.get(_TOOLS) or []

    def new(self, seen: set[str]) -> Chat:
        """This chat without the paragraphs of messages and without the tools that are `seen`."""
        messages = [
            m | {"content": _without(m["content"], seen)} if isinstance(m.get("content"), str) else m
            for m in self.messages
        ]
        tools = [tool for tool in self.tools if _as_json(tool) not in seen]
        return replace(self, messages=messages, settings={**self.settings, _TOOLS: tools or None})

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The chat by the tokenizer's template."""
        return chat_text(tokenizer, self.messages, self.where, **self.settings)


@dataclass(frozen=True)
class Chats:
    """Chats, and a name for them in results.

    If a chat begins like one of `known`, in order, it is written without that beginning.
    """

    name: str
    chats: tuple[Chat, ...]
    tokenizer: PreTrainedTokenizerBase
    known: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """Questions and answers, without system messages, which many chats share."""
        messages = (message for chat in self.chats for message in chat.messages if message["role"] != "system")
        return "\n\n".join(text for message in messages for text in _said(message))

    def halves(self) -> tuple[Chats, Chats]:
        """Cut between two chats, where about half of the text is on either side."""
        sizes = [sum(map(len, chat.said)) for chat in self.chats]
        cut, left = 0, sum(sizes) / 2
        while cut < len(sizes) - 1 and left > sizes[cut] / 2:
            left -= sizes[cut]
            cut += 1
        return replace(self, chats=self.chats[:cut]), replace(self, chats=self.chats[cut:])

    def held_out(self) -> tuple[Chats, Chats, Chats]:
        """The halves, and the second without chats, paragraphs, tools and the template's preamble of the first."""
        first, second = self.halves()
        chats = {tuple(chat.said) for chat in first.chats}
        seen = _paragraphs("\n\n".join(text for chat in chats for text in chat))
        seen |= {_as_json(tool) for chat in first.chats for tool in chat.tools}
        left = [
            chat.new(seen)
            for chat in second.chats
            if tuple(chat.said) not in chats and any(_without(text, seen).strip() for text in chat.said)
        ]
        # The template's preamble depends on whether the chat has a system message, and tools.
        begins = {(chat.messages[0]["role"], not chat.tools): chat for chat in reversed(first.chats)}
        known = tuple(sorted(chat.text(self.tokenizer) for chat in begins.values()))
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
        for chat in self.chats:
            text = chat.text(self.tokenizer)
            place = bisect(self.known, text)  # the neighbours in order share the longest beginnings
            same = max((_same_start(known, text) for known in self.known[max(place - 1, 0) : place + 1]), default=0)
            yield text[same:] if same >= LEAK_CHARACTERS else text


def documents(rows: Rows, tokenizer: PreTrainedTokenizerBase, column: str | None = None) -> PlainText | Chats:
    """The texts in `column` of the rows, or else in the first of these columns that exists.

    `text`: plain text, with a blank line between rows. `messages`, `conversations`: chats of `role` and `content`, or
    of `from` and `value` (ShareGPT), each with what its row holds in `tools`, `system` and `chat_template_kwargs`
    (`chat_of`). `instruction`, `input`, `output` (Alpaca): a chat of a question and its answer, or plain text if the
    tokenizer has no chat template.

    Raises LyapunovPruneError for other columns, for rows that hold anything else, and for chats without a template.
    """
    names = columns_of(rows, column)
    found = list(rows.read([*names, *beside(rows)]))
    if len(names) > 1:
        name = f"{rows.source} ({', '.join(names)}"
        if not tokenizer.chat_template:
            texts = ["\n\n".join(filter(None, _alpaca(where, row))) for where, row in found]
            return PlainText(f"{name}, joined)", "\n\n".join(texts))
        chats = [Chat(where, _question(*_alpaca(where, row))) for where, row in found]
        return Chats(f"{name}, by the chat template)", tuple(chats), tokenizer)
    name = names[0]
    if found and ((column is None and name != "text") or isinstance(found[0][1].get(name), list)):
        require_template(tokenizer, f"{rows.source} ({name})")
        chats = [chat_of(where, row, name) for where, row in found]
        return Chats(f"{rows.source} ({name}, by the chat template)", tuple(chats), tokenizer)
    texts = [_text(where, row, name) for where, row in found]
    return PlainText(rows.source if name == "text" else f"{rows.source} ({name})", "\n\n".join(texts))


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
        f"{rows.source} has no column {column or ', '.join(COLUMNS)} (it has {', '.join(rows.columns)}); give one "
        f"of these as {rows.source}:COLUMN"
    )


def beside(rows: Rows) -> list[str]:
    """The columns of the rows that a chat template takes beside the messages."""
    return [name for name in _BESIDE if name in rows.columns]


def chat_of(where: str, row: Mapping[str, Any], name: str) -> Chat:
    """The chat in column `name` of a row, with its `tools`, `system` and `chat_template_kwargs`, if it has them.

    Lists and dictionaries may be their JSON, as tables and data sets store them; so may tool calls and their arguments.
    `tools` are handed to the template; so are `chat_template_kwargs`, by name. `system` is the first message of a chat
    without one. Raises LyapunovPruneError for anything else.
    """
    value, tools, system, settings = (_parsed(row.get(key)) for key in (name, *_BESIDE))
    messages = [_message(each) for each in value] if isinstance(value, list) else []
    if not messages or not all(messages):
        raise LyapunovPruneError(
            f'{where} holds no chat of texts with roles; give [{{"role": "user", "content": "…"}}, …] or '
            '[{"from": "human", "value": "…"}, …]'
        )
    schemas = [_parsed(tool) for tool in tools] if isinstance(tools, list) else [tools] if tools else []
    wrong = {
        f"{_TOOLS} that are no JSON schemas of functions": not all(isinstance(schema, dict) for schema in schemas),
        f"{_SETTINGS} that are no dictionary": bool(settings) and not isinstance(settings, dict),
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{where} holds {why}; mend the row, or leave the column out")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    told = [_told(schema) for schema in schemas]
    return Chat(where, messages, {_TOOLS: told or None, **_told(settings or {})})


def _told(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that hold something: a table has all fields in every row, and None marks a missing one."""
    return {key: value for key, value in fields.items() if value is not None}


def _parsed(value: Any) -> Any:
    """The list or dictionary that a string of JSON holds; any other value as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            found = parsed_line(value)
            return found if found is None or isinstance(found, list | dict) else value
    return value


def _message(message: Any) -> Message:
    """`message` in the format of chat templates; empty if it is no text with a role."""
    told = _told(message) if isinstance(message, dict) else {}
    role = told.pop("role", told.pop("from", None))
    content = told.pop("content", told.pop("value", None))
    if isinstance(content, list):  # parts, as for models that read pictures
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if role == "function_call":  # of LLaMA-Factory: one, or a list of them
        calls = _parsed(content)
        made = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
        role, content, told["tool_calls"] = "assistant", "", made
    if "tool_calls" in told:
        told["tool_calls"] = _calls(told["tool_calls"])
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and told.get("tool_calls"))):
        return {}
    empty = content is None and not {"content", "value"} & set(message)  # templates tell None from nothing
    return {"role": _ROLES.get(role, role), **({} if empty else {"content": content}), **told}


def _calls(value: Any) -> list[Any]:
    """Tool calls with arguments as dictionaries, which templates write as JSON; empty if `value` holds none."""
    calls = _parsed(value)
    known = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    return [_call(call) for call in calls] if known else []


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return call | {"function": _call(function)}
    return call | {"arguments": _parsed(call["arguments"])} if "arguments" in call else call


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


def _said(message: Message) -> list[str]:
    content, calls = message.get("content"), message.get("tool_calls")
    return [*([content] if isinstance(content, str) else []), *([_as_json(calls)] if calls else [])]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _same_start(one: str, other: str) -> int:
    """Number of leading characters that both share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _paragraphs(text: str) -> set[str]:
    return {part.strip() for part in _PARAGRAPH_END.split(text) if len(part) >= LEAK_CHARACTERS}


def _without(text: str, paragraphs: set[str]) -> str:
    return "".join(part for part in _PARAGRAPH_END.split(text) if part.strip() not in paragraphs)
