"""Chats through the model's own template, Alpaca's columns, named columns; and halves of them that share nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers import make_tokenizer
from pyarrow import parquet
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import compress, load_text
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.data.documents import Chat, Chats, chat_of
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.history import add_step

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PREAMBLE = "You are a model of few words, made on a day that nobody knows, and you answer all that you are asked. " * 3
SYSTEM = "The system says at great length what every one of these chats begins with, word by word: " + PREAMBLE
Turns = list[tuple[str, str]]


def turns(n: int, system: str = "") -> Turns:
    said = [
        ("user", f"What is {n} times {n * 7}?"),
        ("assistant", " ".join(f"It is {n * i * 7919 % 10007}," for i in range(30))),
    ]
    return [("system", system)] * bool(system) + said


def openai(chat: Turns) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in chat]}


def sharegpt(chat: Turns) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"id": "x", "conversations": [{"from": names[role], "value": content} for role, content in chat]}


def alpaca(chat: Turns) -> dict[str, Any]:
    (_, asked), (_, answer) = chat
    return {"instruction": asked[:9], "input": asked[9:], "output": answer}


@pytest.fixture
def chatty() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(eos_token="</s>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def written(rows: list[dict[str, Any]], name: str = "x.jsonl") -> str:
        path = tmp_path / name
        if path.suffix == ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return str(path)

    return written


def text_of(batch: TokenBatch, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(batch.ids.flatten())


def all_of(source: str, tokenizer: PreTrainedTokenizerFast, tokens: int, **options: Any) -> TokenBatch:
    return load_text(source, tokenizer, tokens=tokens, context=tokens, split="all", bos=False, **options)


# What is read.


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
@pytest.mark.parametrize("form", [openai, sharegpt], ids=["messages", "conversations"])
def test_chats_are_written_by_the_template(
    form: Callable[[Turns], dict[str, Any]], name: str, chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    chats = [turns(n, "Be short." if n % 2 else "") for n in range(5)]
    messages = [openai(chat)["messages"] for chat in chats]
    wanted = "".join(chatty.apply_chat_template(m, tokenize=False) for m in messages)
    source = write([form(chat) for chat in chats], name)
    batch = all_of(source, chatty, len(chatty(wanted)["input_ids"]))
    assert text_of(batch, chatty) == wanted
    column = "messages" if form is openai else "conversations"
    assert batch.text == f"{source} ({column}, by the chat template)"


def test_alpaca_is_a_chat_where_there_is_a_template(
    chatty: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    source = write([alpaca(turns(n)) for n in range(9)])
    assert text_of(all_of(source, chatty, 80), chatty).startswith(
        "<s>user\nWhat is 0\n\n times 0?</s>\n<s>assistant\nIt is 0, "
    )
    assert all_of(source, chatty, 80).text == f"{source} (instruction, input, output, by the chat template)"
    assert text_of(all_of(source, tokenizer, 80), tokenizer).startswith("What is 0\n\n times 0?\n\nIt is 0, It is 0")
    assert all_of(source, tokenizer, 80).text == f"{source} (instruction, input, output, joined)"


def test_alpaca_needs_no_input(chatty: PreTrainedTokenizerFast, write: Callable[..., str]) -> None:
    source = write([{"instruction": f"Say {n}.", "output": "yes, no, " * 9} for n in range(9)])
    assert text_of(all_of(source, chatty, 60), chatty).startswith("<s>user\nSay 0.</s>\n<s>assistant\nyes, ")


def test_a_column_is_read_by_its_name(
    chatty: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast, write: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"text": "not this", "story": f"Story {n} is long. " * 9, **openai(turns(n))} for n in range(9)]
    for name in ("x.jsonl", "x.parquet"):
        source = write(rows, name)
        named = all_of(f"{source}:story", tokenizer, 200)
        assert text_of(named, tokenizer).startswith("Story 0 is long. Story 0")
        assert named.text == f"{source} (story)"
        assert text_of(all_of(f"{source}:messages", chatty, 90), chatty).startswith("<s>user\nWhat is 0")
        assert text_of(all_of(source, chatty, 9), chatty).startswith("not")  # text comes first
        with pytest.raises(LyapunovPruneError, match=r"column tale .*story, messages"):
            all_of(f"{source}:tale", tokenizer, 200)
    plain = tmp_path / "plain.txt"
    plain.write_text("No columns. " * 99)
    for missing in ("builtin:story", f"{plain}:story"):
        with pytest.raises(LyapunovPruneError, match="leave out :story"):
            all_of(missing, tokenizer, 200)
    with pytest.raises(LyapunovPruneError, match=r"gone\.jsonl is no readable file"):
        all_of("gone.jsonl:story", tokenizer, 200)


def test_a_chat_may_be_a_string_of_json(chatty: PreTrainedTokenizerFast, write: Callable[..., str]) -> None:
    rows = [openai(turns(n)) for n in range(9)]
    wanted = all_of(write(rows), chatty, 90)
    told = all_of(write([{"messages": json.dumps(row["messages"])} for row in rows], "y.jsonl"), chatty, 90)
    assert told.text_hash == wanted.text_hash
    with pytest.raises(LyapunovPruneError, match="line 1 holds no chat"):  # Python's list, as pandas writes it
        all_of(write([{"messages": str(row["messages"])} for row in rows], "y.jsonl"), chatty, 90)


def test_fields_that_a_table_leaves_empty_are_not_there(chatty: PreTrainedTokenizerFast) -> None:
    calls = [{"type": "function", "function": {"name": "add"}}]
    value = [
        {"role": "user", "content": "Add.", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"from": "observation", "value": "4", "role": None},
        {"role": "user", "content": [{"type": "text", "text": "So"}, {"type": "text", "text": "?"}]},
    ]
    assert chat_of("x line 1", {"messages": value}, "messages").messages == [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "So?"},
    ]


def test_a_template_with_a_date_gives_the_same_tokens_every_day(
    chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    chatty.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    source = write([openai(turns(n)) for n in range(9)])
    assert datetime.now().strftime("%Y-%m-%d") not in text_of(all_of(source, chatty, 90), chatty)


# Tools, and BOS.

TOOLS = (
    "{{ bos_token }}{% if tools %}# Tools, of which you may call one or more\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}{% endif %}{% if style is defined %}Style: {{ style }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% if m.content is none %}(none){% endif %}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}\n{% endfor %}"
)


def tool(name: str, *fields: str) -> dict[str, Any]:
    properties = {field: {"type": "string", "description": f"The {field} of {name}."} for field in fields}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def calling(n: int, content: str | None = None, **arguments: Any) -> list[dict[str, Any]]:
    call = {
        "type": "function",
        "function": {"name": "look", "arguments": arguments or {"place": f"{n * 7919 % 10007}"}},
    }
    return [
        {"role": "user", "content": f"What is {n} times {n * 7}?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": f"It is {n * 7907 % 10007}."},
        {"role": "assistant", "content": " ".join(f"So {n * i * 7919 % 10007}," for i in range(9))},
    ]


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """The row as data sets of tools keep it: what differs from row to row as JSON."""
    messages = copy.deepcopy(row["messages"])
    for call in (call["function"] for m in messages for call in m.get("tool_calls", ())):
        call["arguments"] = json.dumps(call["arguments"])
    return row | {"messages": messages, "tools": json.dumps(row["tools"])}


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize("keep", [dict, stored], ids=["nested", "JSON"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_chats_with_tools_are_what_the_tokenizer_writes(
    keep: Callable[[dict[str, Any]], dict[str, Any]], name: str, adds_bos: bool, write: Callable[..., str]
) -> None:
    chatty = make_tokenizer(adds_bos=adds_bos)
    chatty.chat_template = {"default": "no tools", "tool_use": TOOLS}  # as Command R and Hermes have them
    rows: list[dict[str, Any]] = [
        {"messages": calling(1), "tools": [tool("look", "place")]},
        {"messages": calling(2, "", day="3"), "tools": [tool("ask", "day", "hour"), tool("look", "place")]},
    ]
    wanted = "".join(chatty.apply_chat_template(r["messages"], tools=r["tools"], tokenize=False) for r in rows)
    ids = chatty(wanted, add_special_tokens=False)["input_ids"]
    source = write([keep(row) for row in rows], name)
    context = len(ids) // 2
    batch = load_text(source, chatty, tokens=2 * context, context=context, split="all")
    assert batch.bos is adds_bos
    assert batch.ids[0].tolist() == ids[:context]  # one BOS, the template's
    assert batch.ids[1].tolist() == ([1] * adds_bos + ids[context:])[:context]


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_message_of_calls_alone_is_written_as_the_tokenizer_does(
    content: dict[str, Any], chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    chatty.chat_template = TOOLS
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": None}}}]} | content
    wanted = chatty.apply_chat_template([message], tokenize=False, style="brief")
    source = write([{"messages": [message], "tools": None, "chat_template_kwargs": {"style": "brief"}}])
    assert text_of(all_of(source, chatty, len(chatty(wanted)["input_ids"])), chatty) == wanted


def test_what_llama_factory_writes_is_a_chat_with_calls() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Where?"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"place": "here"}}'},
            {"from": "observation", "value": "There."},
        ],
        "tools": json.dumps([tool("look", "place")]),
        "system": "Be short.",
    }
    chat = chat_of("x line 1", row, "conversations")
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
    assert chat.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "There."},
    ]
    assert chat.tools == [tool("look", "place")]


@pytest.mark.parametrize("beside", [{"tools": "call me"}, {"tools": [3]}, {"chat_template_kwargs": "loud"}])
def test_tools_that_are_none_are_refused(
    beside: dict[str, Any], chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    with pytest.raises(LyapunovPruneError, match="line 2 holds"):
        all_of(write([openai(turns(1)), openai(turns(2)) | beside]), chatty, 90)


def test_halves_of_chats_with_the_same_tools_share_nothing(
    chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    chatty.chat_template = TOOLS
    tools = [tool("look", "place", "day", "hour"), tool("ask", "day")]
    new = [tool("find", "name", "street", "town")]
    rows = [{"messages": calling(n), "tools": tools + new * (n > 50)} for n in range(60)]
    source = write(rows)
    first, second = (
        load_text(source, chatty, tokens=4096, context=128, split=split) for split in ("calibration", "evaluation")
    )
    require_disjoint(first, second)
    assert "The place of look" in text_of(first, chatty)
    assert "<call>" in text_of(second, chatty)
    left = load_text(source, chatty, tokens=8192, context=128, split="evaluation")
    assert "The street of find" in text_of(left, chatty)


def test_chats_that_differ_in_their_calls_are_two(chatty: PreTrainedTokenizerFast, write: Callable[..., str]) -> None:
    chatty.chat_template = TOOLS
    rows = [
        {"messages": [{"role": "assistant", "content": "", **calling(n)[1]} for n in (m, m + 1)]} for m in range(99)
    ]
    assert "<call>" in text_of(load_text(write(rows), chatty, tokens=99, context=99, split="evaluation"), chatty)


# Refused.


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "line 2 holds no chat"),
        ("hello", "line 2 holds no chat"),
        (None, "line 2 holds no chat"),
        ([{"role": "user"}], "line 2 holds no chat"),
        ([{"content": "x"}], "line 2 holds no chat"),
        (["x"], "line 2 holds no chat"),
        ([{"role": 1, "content": "x"}], "line 2 holds no chat"),
        ([{"role": "user", "content": [{"type": "image"}]}], "line 2 holds no chat"),
        ([{"role": "judge", "content": "x"}], "line 2: TemplateError: no judge here"),
    ],
)
def test_what_is_no_chat_is_one_line(
    value: Any, told: str, chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    chatty.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'judge' %}{{ raise_exception('no judge here') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    source = write([openai(turns(1)), {"messages": value}])
    with pytest.raises(LyapunovPruneError, match=told) as raised:
        all_of(source, chatty, 2000)
    assert "\n" not in str(raised.value)


def test_chats_without_a_template_are_refused(tokenizer: PreTrainedTokenizerFast, write: Callable[..., str]) -> None:
    with pytest.raises(LyapunovPruneError, match="chat template"):
        all_of(write([openai(turns(1))]), tokenizer, 20)


# Halves.


@pytest.fixture(params=["plain", "system", "preamble", "default preamble", "one line"])
def halves(request: pytest.FixtureRequest, chatty: PreTrainedTokenizerFast, write: Callable[..., str]) -> Any:
    """A loader of 2,000 tokens of a file of chats, all of which begin alike."""
    systems = [SYSTEM] * 40 if request.param in ("system", "one line") else [""] * 40
    if request.param == "preamble":
        chatty.chat_template = PREAMBLE + CHATML
    if request.param == "default preamble":  # only where the chat has no system message
        chatty.chat_template = "{% if messages[0]['role'] != 'system' %}" + PREAMBLE + "{% endif %}" + CHATML
        systems[::3] = ["Be short."] * len(systems[::3])
    if request.param == "one line":
        chatty.chat_template = CHATML.replace("\n", "")
    source = write([openai(turns(n, system)) for n, system in enumerate(systems)])
    return lambda split: load_text(source, chatty, tokens=2048, context=128, split=split)


def test_halves_of_chats_share_nothing(halves: Callable[[str], TokenBatch]) -> None:
    require_disjoint(halves("calibration"), halves("evaluation"))


def test_chats_that_a_model_saw_are_known(halves: Callable[[str], TokenBatch], reader: PreTrainedModel) -> None:
    made = copy.copy(reader)
    add_step(made, "prune", [halves("calibration").measured_on(reader)], reader)
    require_unseen(made, halves("evaluation"))
    for split in ("calibration", "all"):
        with pytest.raises(LyapunovPruneError, match=r"by the chat template\) \(calibration"):
            require_unseen(made, halves(split))


def test_a_compression_records_the_chats(
    halves: Callable[[str], TokenBatch], chatty: PreTrainedTokenizerFast, reader: PreTrainedModel
) -> None:
    report = compress(reader, halves("calibration"), method="wanda", sparsity=0.5).report
    assert report.calibration is not None
    assert report.calibration.text.endswith("x.jsonl (messages, by the chat template)")


def test_chats_that_come_again_leave_the_second_half(
    chatty: PreTrainedTokenizerFast, write: Callable[..., str]
) -> None:
    chats = [turns(n) for n in range(40)]
    chats[30] = chats[3]
    chats[31] = [("user", "And a new question?"), chats[4][1]]  # the answer alone comes again
    source = write([openai(chat) for chat in chats])
    first, second = (
        text_of(load_text(source, chatty, tokens=tokens, context=200, split=split), chatty)
        for split, tokens in (("calibration", 5000), ("evaluation", 5800))
    )
    for _, said in chats[3]:
        assert said in first
        assert said not in second
    assert "And a new question?" in second
    assert chats[4][1][1] not in second
    assert chats[35][1][1] in second


def test_doubled_chats_have_no_evaluation_half(chatty: PreTrainedTokenizerFast, write: Callable[..., str]) -> None:
    source = write([openai(turns(n)) for n in range(20)] * 2)
    with pytest.raises(LyapunovPruneError, match=r"repeats itself: \d+%"):
        load_text(source, chatty, tokens=200, context=200, split="evaluation")


def test_the_halves_of_chats_meet_between_two(chatty: PreTrainedTokenizerFast) -> None:
    for sizes, cut in (([9, 9, 9, 9], 2), ([30, 1, 1, 1], 1), ([1, 1, 1, 30], 3), ([5], 0)):
        chats = tuple(Chat(f"line {i}", [{"role": "user", "content": "x" * size}]) for i, size in enumerate(sizes))
        first, second = Chats("x", chats, chatty).halves()
        assert first.chats + second.chats == chats
        assert len(first.chats) == cut
