"""Text becomes windows of ids; calibration and evaluation never share any of it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import as_batch, make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.data import text as module
from lyapunov_prune.data.batch import LEAK_TOKENS, TokenBatch, require_disjoint
from lyapunov_prune.data.documents import PlainText
from lyapunov_prune.data.sources import OWN
from lyapunov_prune.data.text import load_text
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.history import add_step

# Paragraphs that all differ, and one that comes back: in the first half, and again in the second.
REPEATED = "This paragraph stands in the text twice, and it is longer than a heading would ever be: a leak."
PARAGRAPHS = [
    " ".join(f"Sentence {i} of paragraph {n} says {n * i * 7919 % 10007}." for i in range(20)) for n in range(40)
]
PARAGRAPHS[5] = PARAGRAPHS[25] = REPEATED


@pytest.fixture(params=["builtin", "code", "txt", "jsonl"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in OWN:
        return request.param
    path = tmp_path / f"text.{request.param}"
    lines = [json.dumps({"text": p}) for p in PARAGRAPHS]
    path.write_text("\n\n".join(PARAGRAPHS) if request.param == "txt" else "\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def read(tokenizer: PreTrainedTokenizerFast) -> Callable[..., TokenBatch]:
    """`load_text` of 8,000 tokens, as the tests below want it."""

    def load(source: str, **options: Any) -> TokenBatch:
        return load_text(source, tokenizer, **{"tokens": 8000, "context": 200, **options})

    return load


def decoded(batch: TokenBatch, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(batch.ids.flatten())


# Splits.


def test_splits_share_no_text(source: str, read: Callable[..., TokenBatch]) -> None:
    require_disjoint(read(source), read(source, split="evaluation"))


def test_a_split_that_leaks_is_caught(
    source: str, read: Callable[..., TokenBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_split", lambda source, whole, split: whole)
    with pytest.raises(LyapunovPruneError, match=f"share {LEAK_TOKENS} tokens"):
        require_disjoint(read(source), read(source, split="evaluation"))


def test_a_planted_run_of_tokens_is_caught(source: str, read: Callable[..., TokenBatch]) -> None:
    calibration, evaluation = read(source), read(source, split="evaluation")
    evaluation.ids[3, 17 : 17 + LEAK_TOKENS] = calibration.ids[1, 90 : 90 + LEAK_TOKENS]
    with pytest.raises(LyapunovPruneError, match="share"):
        require_disjoint(calibration, evaluation)


def test_a_shorter_run_is_no_leak(source: str, read: Callable[..., TokenBatch]) -> None:
    calibration, evaluation = read(source), read(source, split="evaluation")
    evaluation.ids[3, 17 : 17 + LEAK_TOKENS // 2] = calibration.ids[1, 90 : 90 + LEAK_TOKENS // 2]
    require_disjoint(calibration, evaluation)


def test_windows_shorter_than_a_leak_are_compared_whole() -> None:
    ids = torch.arange(32).view(2, 16)
    with pytest.raises(LyapunovPruneError, match="share 16 tokens"):
        require_disjoint(TokenBatch(ids, "a", "all", None), TokenBatch(ids.flip(0), "b", "all", None))


@pytest.mark.parametrize("bos", [False, True, None])
@pytest.mark.parametrize("context", [16, 32, 64, 65, 128, 1024])
def test_a_shift_by_one_token_hides_no_leak(context: int, bos: bool | None) -> None:
    """`bos` None: ids that were given, with a BOS that nobody spoke of."""
    tokens = torch.randperm(1025, generator=torch.Generator().manual_seed(0)) + 1
    width = context if bos is False else context - 1

    def cut(ids: torch.Tensor) -> TokenBatch:
        windows = ids[: len(ids) // width * width].view(-1, width)
        if width < context:
            windows = torch.cat([torch.zeros(len(windows), 1, dtype=torch.int64), windows], dim=1)
        return TokenBatch(windows, "a", "all", bos)

    with pytest.raises(LyapunovPruneError, match="share"):
        require_disjoint(cut(tokens[:-1]), cut(tokens[1:]))


def test_halves_of_different_tokens_share_nothing() -> None:
    halves = torch.randperm(1024).view(2, 16, 32)
    require_disjoint(*(TokenBatch(half, "a", "all", None) for half in halves))


def test_a_run_that_the_end_of_a_window_cuts_is_a_leak() -> None:
    tokens = torch.arange(2000)
    seen, other = tokens[:960].view(10, 96), tokens[1000:1960].view(10, 96).clone()
    other.flatten()[64:128] = seen.flatten()[100:164]  # 32 of them in either window
    with pytest.raises(LyapunovPruneError, match="share 64 tokens"):
        require_disjoint(TokenBatch(seen, "a", "all", False), TokenBatch(other, "b", "all", False))
    other.flatten()[64] = 0
    require_disjoint(TokenBatch(seen, "a", "all", False), TokenBatch(other, "b", "all", False))


def test_a_paragraph_of_the_first_half_leaves_the_second(
    read: Callable[..., TokenBatch], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("\n\n".join(PARAGRAPHS))
    halves = {
        split: decoded(read(str(tmp_path / "x.txt"), split=split, tokens=13_000), tokenizer)
        for split in ("calibration", "evaluation")
    }
    assert REPEATED in halves["calibration"]
    assert REPEATED not in halves["evaluation"]
    assert PARAGRAPHS[26][:100] in halves["evaluation"]


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_the_halves_meet_and_do_not_overlap(mark: str) -> None:
    text = mark.join(f"word{n}" for n in range(5000))
    first, second = PlainText("x", text).halves()
    assert first.content + second.content == text


@pytest.mark.parametrize("mark", ["\n", " ", ""], ids=["lines", "one line", "one word"])
def test_a_text_without_paragraphs_is_split_too(mark: str, read: Callable[..., TokenBatch], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(mark.join(f"word{n}" for n in range(5000)))
    path = str(tmp_path / "x.txt")
    require_disjoint(read(path), read(path, split="evaluation"))


def test_all_is_the_whole_text(
    read: Callable[..., TokenBatch], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("0123456789" * 40)
    assert decoded(read(str(tmp_path / "x.txt"), split="all", tokens=400), tokenizer) == "0123456789" * 40


def test_an_unknown_split_is_refused(source: str, read: Callable[..., TokenBatch]) -> None:
    with pytest.raises(LyapunovPruneError, match="split is 'test'"):
        read(source, split="test")


@pytest.mark.parametrize("between", ["", "\n\n", "\n\nA paragraph that nothing else in this text is like.\n\n"])
@pytest.mark.parametrize("mark", ["\n\n", "\n", " "], ids=["paragraphs", "lines", "one line"])
def test_a_doubled_text_has_no_evaluation_half(
    mark: str, between: str, read: Callable[..., TokenBatch], tmp_path: Path
) -> None:
    once = mark.join(PARAGRAPHS)
    (tmp_path / "x.txt").write_text(once + between + once)
    with pytest.raises(LyapunovPruneError, match=r"x\.txt repeats itself"):
        read(str(tmp_path / "x.txt"), split="evaluation", tokens=200)
    assert read(str(tmp_path / "x.txt")).ids.shape == (40, 200)


def test_some_repeats_leave_an_evaluation_half(read: Callable[..., TokenBatch], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\n\n".join(PARAGRAPHS + PARAGRAPHS[:5] + PARAGRAPHS[-5:]))
    path = str(tmp_path / "x.txt")
    require_disjoint(read(path), read(path, split="evaluation"))


def test_an_evaluation_half_that_is_too_short_without_its_repeats(
    read: Callable[..., TokenBatch], tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("\n\n".join(PARAGRAPHS[:4] + PARAGRAPHS[:2] + PARAGRAPHS[6:8]))
    with pytest.raises(LyapunovPruneError, match=r"\(evaluation, less"):
        read(str(tmp_path / "x.txt"), split="evaluation", tokens=3000)


@pytest.mark.parametrize("context", [2, 200])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("split", ["calibration", "all"])
def test_one_token_over_and_over_is_no_text(
    split: str, bos: bool, context: int, read: Callable[..., TokenBatch], tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("." * 40_000)
    with pytest.raises(LyapunovPruneError, match=rf"x\.txt \({split}\) is one token"):
        read(str(tmp_path / "x.txt"), split=split, bos=bos, context=context)


@pytest.mark.parametrize("context", [2, 200])
def test_short_windows_of_a_text_are_no_repetition(context: int, read: Callable[..., TokenBatch]) -> None:
    assert read("builtin", context=context, bos=True).context == context


# What a model was made with.


def seen_by(model: PreTrainedModel, batch: TokenBatch) -> PreTrainedModel:
    made = copy.copy(model)
    add_step(made, "prune", [batch.measured_on(model)], model)
    return made


def test_a_model_is_not_scored_on_what_it_was_made_with(
    source: str, reader: PreTrainedModel, read: Callable[..., TokenBatch]
) -> None:
    batch = read(source, context=100)
    model = seen_by(reader, batch)
    require_unseen(reader, batch)
    require_unseen(model, read(source, context=100, split="evaluation"))
    for options in ({}, {"context": 128}, {"bos": True}, {"tokens": 400}, {"split": "all"}, {"tokens": 9000}):
        with pytest.raises(LyapunovPruneError, match="evaluation half"):
            require_unseen(model, read(source, **{"context": 100, **options}))


def test_the_line_says_how_much_is_shared(reader: PreTrainedModel, read: Callable[..., TokenBatch]) -> None:
    batch = read("builtin", context=100)
    other = read("builtin", context=100, split="evaluation")
    other.ids[3:6] = batch.ids[10:13]
    with pytest.raises(LyapunovPruneError, match=r"calibration.*(29\d|30\d) of the 8000"):
        require_unseen(seen_by(reader, batch), other)


# Windows and their hash.


def test_windows_are_whole_and_follow_each_other(
    read: Callable[..., TokenBatch], tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = read("builtin", tokens=1100, context=500)
    assert batch.ids.shape == (2, 500)
    assert batch.ids.dtype == torch.int64
    longer = read("builtin", tokens=1100, context=1100)
    assert torch.equal(batch.ids.flatten(), longer.ids.flatten()[:1000])


def test_the_hash_is_of_the_tokens_and_their_shape(read: Callable[..., TokenBatch]) -> None:
    batch = read("builtin")
    assert read("builtin").text_hash == batch.text_hash
    one_changed = batch.ids.clone()
    one_changed[-1, -1] += 1
    others = [one_changed, batch.ids.reshape(-1, 100), batch.ids[:-1], batch.ids.flip(0)]
    hashes = {TokenBatch(ids, batch.text, batch.split, batch.bos).text_hash for ids in others}
    assert len(hashes | {batch.text_hash}) == 5


def test_the_hash_ignores_where_the_tokens_came_from() -> None:
    ids = torch.arange(8).view(2, 4)
    assert TokenBatch(ids, "a", "all", None).text_hash == TokenBatch(ids.int(), "b", "evaluation", True).text_hash


def test_a_measurement_records_its_tokens(reader: PreTrainedModel, read: Callable[..., TokenBatch]) -> None:
    batch = read("builtin", tokens=400, context=100)
    found = batch.measured_on(reader, seed=3)
    assert (found.text, found.split, found.tokens, found.context) == ("builtin", "calibration", 400, 100)
    assert (found.text_hash, found.bos, found.seed, found.dtype) == (batch.text_hash, False, 3, "float32")


# BOS.


@pytest.mark.parametrize("habit", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
def test_bos_is_as_asked_or_as_the_tokenizer_has_it(habit: bool, asked: bool | None) -> None:
    batch = load_text("builtin", make_tokenizer(adds_bos=habit), tokens=400, context=100, bos=asked)
    wanted = habit if asked is None else asked
    assert batch.bos is wanted
    assert batch.ids.shape == (4, 100)
    assert bool((batch.ids[:, 0] == 1).all()) is wanted
    assert not (batch.ids[:, 1:] == 1).any()


def test_bos_takes_no_text_away(read: Callable[..., TokenBatch]) -> None:
    plain, with_bos = read("builtin", context=199), read("builtin", context=200, bos=True)
    assert torch.equal(with_bos.ids[:, 1:], plain.ids)


def test_bos_from_a_tokenizer_without_one_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="bos=False"):
        load_text("builtin", make_tokenizer(eos_token="</s>"), tokens=400, context=100, bos=True)


# Bad files.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", r"x.txt \(calibration\) holds no text"),
        (
            "x.txt",
            b"too short",
            r"x.txt \(calibration\) has . tokens and 8000",
        ),
        ("x.jsonl", b"", r"x.jsonl \(calibration\) holds no text"),
        ("x.txt", "café".encode("latin-1") * 9999, "UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3 is no JSON object"),
        ("x.jsonl", b'{"txt": "a"}', "has txt.*x.jsonl:COLUMN"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": "a"}', "line 2 has no string 'text'"),
        ("x.jsonl", b'{"text": 3}', "line 1 has no string 'text'"),
        ("x.jsonl", b'["text"]', "line 1 is no JSON object"),
        ("x.jsonl", b'"text"', "line 1 is no JSON object"),
    ],
    ids=["empty", "too short", "empty JSONL", "Latin-1", "cut", "no text", "later no text", "number", "list", "string"],
)
def test_a_bad_file_is_refused(
    name: str, content: bytes, message: str, read: Callable[..., TokenBatch], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LyapunovPruneError, match=message):
        read(str(tmp_path / name))


def test_a_list_of_texts_is_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [f"Line {n} of a text, and its number squared is {n * n}." for n in range(200)]
    first, second = (
        load_text(texts, tokenizer, tokens=256, context=64, split=split) for split in ("calibration", "evaluation")
    )
    assert first.text == "200 texts"
    require_disjoint(first, second)


@pytest.mark.parametrize("name", ["absent.txt", "absent.md", "absent.jsonl.gz", "./absent", "a/b/absent", "."])
def test_a_missing_file_is_refused(name: str, read: Callable[..., TokenBatch], tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="no readable file"):
        read(str(tmp_path / name))


def test_a_byte_order_mark_is_no_text(read: Callable[..., TokenBatch], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "word " * 4000}).encode())
    assert read(str(tmp_path / "x.jsonl")).ids.shape == (40, 200)


def test_a_line_separator_inside_a_string_ends_no_line(read: Callable[..., TokenBatch], tmp_path: Path) -> None:
    line = json.dumps({"text": "one\u2028two " * 2000}, ensure_ascii=False)
    (tmp_path / "x.jsonl").write_text(line, encoding="utf-8")
    assert read(str(tmp_path / "x.jsonl")).ids.shape == (40, 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context is 1; give int of 2 or more"),
        ({"tokens": 50}, "50 tokens .*200"),
    ],
)
def test_sizes_without_a_window_are_refused(
    options: dict[str, int], message: str, read: Callable[..., TokenBatch]
) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        read("builtin", **options)


# Hub data sets.


class Column(SimpleNamespace):
    """As much of a data set as the loader touches."""

    def __getitem__(self, name: str) -> list[str]:
        assert name == "text"
        return PARAGRAPHS


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A `datasets` package that hands out PARAGRAPHS, and what it was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> Column:
        asked.append((name, config, split))
        return Column(column_names=["text"])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("org/set", ("org/set", None, "test")),
        ("org/set:config", ("org/set", "config", "test")),
        ("org/set:config:train", ("org/set", "config", "train")),
        ("set::train", ("set", None, "train")),
        ("org/set:config:train:text", ("org/set", "config", "train")),
        ("org/set:::text", ("org/set", None, "test")),
    ],
)
def test_a_data_set_is_asked_for_by_name_config_and_split(
    source: str, asked: tuple[Any, ...], hub: list[tuple[Any, ...]], read: Callable[..., TokenBatch]
) -> None:
    assert read(source).text == source.removesuffix(":text")
    assert hub == [asked]


def test_the_splits_of_a_data_set_share_no_text(hub: list[tuple[Any, ...]], read: Callable[..., TokenBatch]) -> None:
    require_disjoint(read("org/set"), read("org/set", split="evaluation"))


def test_a_data_set_without_the_package_names_the_extra(
    read: Callable[..., TokenBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(LyapunovPruneError, match=r"lyapunov-prune\[data\]"):
        read("org/set")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ConnectionError("no route to host\nmore"), "no route to host"), (ValueError(), "ValueError")],
)
def test_a_data_set_that_does_not_come_is_named(
    error: Exception, reason: str, read: Callable[..., TokenBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(LyapunovPruneError, match=f"org/set: {reason}"):
        read("org/set")


def test_a_data_set_without_text_is_refused(read: Callable[..., TokenBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SimpleNamespace(column_names=["question", "answer"])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *a, **k: rows))
    with pytest.raises(LyapunovPruneError, match="question, answer"):
        read("org/set")


# A batch for a model.


def test_plain_ids_become_a_batch(reader: PreTrainedModel, ids: torch.Tensor) -> None:
    batch = as_batch(reader, ids)
    assert torch.equal(batch.ids, ids)
    assert (batch.text, batch.split, batch.bos) == ("token ids", "all", None)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 129, dtype=torch.int64), "129 .*model's 128"),
        (torch.full((1, 4), 260), "token id 260 .*260"),
        (torch.full((1, 4), -1), "token id -1"),
        (torch.zeros(1, 1, dtype=torch.int64), "two tokens or more"),
        (torch.zeros(0, 4, dtype=torch.int64), "two tokens or more"),
        (torch.zeros(4, dtype=torch.int64), r"\(4,\)"),
        (torch.zeros(1, 4), "token ids are torch.float32"),
    ],
    ids=["too long", "id too large", "negative id", "one token", "no window", "one dimension", "float"],
)
def test_a_batch_that_does_not_fit_is_refused(reader: PreTrainedModel, ids: torch.Tensor, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        as_batch(reader, ids)


def test_a_batch_may_be_as_long_as_the_context(reader: PreTrainedModel) -> None:
    assert as_batch(reader, torch.zeros(1, 128, dtype=torch.int64)).context == 128


@pytest.mark.parametrize("letters", [5, 10, 30])
def test_a_text_of_few_tokens_is_read_to_its_end(letters: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten letters a token are looked at first, and all where that is too few."""
    seen: list[int] = []

    def few(tokenizer: Any, text: str, special: bool = False) -> list[int]:
        seen.append(len(text))
        return [int(word) for word in text.split()]

    monkeypatch.setattr(module, "token_ids", few)
    (tmp_path / "x.txt").write_text("".join(f"{n:>{letters}}" for n in range(1000)))
    batch = load_text(tmp_path / "x.txt", make_tokenizer(), tokens=207, context=50, split="all", bos=False)
    assert batch.ids.flatten().tolist() == list(range(200))
    assert seen == ([10 * 200 + 1000] if letters < 30 else [3000, 30_000])
    with pytest.raises(LyapunovPruneError, match="1000 tokens and 1050"):
        load_text(tmp_path / "x.txt", make_tokenizer(), tokens=1050, context=50, split="all", bos=False)
    whole = load_text(tmp_path / "x.txt", make_tokenizer(), tokens=1000, context=50, split="all", bos=False)
    assert whole.ids.shape == (20, 50)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 50 + "\n\n" + "b" * 40, "a" * 50 + "\n\n"),  # at the blank line behind the middle
        ("a" * 68 + "\n\n" + "b" * 20 + "c" * 10, "a" * 68 + "\n\n"),
        ("a" * 76 + "\n\n" + "b" * 22, "a" * 50),  # no further than three quarters
        ("a" * 60 + " " + "b" * 20 + "\n" + "c" * 18, "a" * 60 + " "),
        ("a" * 10 + "\n\n" + "b" * 40 + " " + "c" * 47, "a" * 10 + "\n\n" + "b" * 38),
        ("a" * 99, "a" * 49),
    ],
)
def test_halves_meet_at_the_first_mark_behind_the_middle(text: str, first: str) -> None:
    if text.startswith("a" * 10 + "\n"):
        first += "bb "  # the blank line lies before the middle, the space behind it
    assert [half.content for half in PlainText("x", text).halves()] == [first, text[len(first) :]]


def test_repeats_of_more_than_half_of_the_second_half_are_refused() -> None:
    """Samples of 256 letters, of which as many must be new as make up half of it."""
    first = "".join(f"{n:04}" for n in range(1000))
    for share, refused in ((0.4, False), (0.6, True)):
        old = int(share * len(first))
        new = "".join(f"{n:04}" for n in range(5000, 6000))[: len(first) - old]
        second = first[:old] + new
        if refused:
            with pytest.raises(LyapunovPruneError, match="repeats itself"):
                module._require_new("x", first, second, second)
        else:
            module._require_new("x", first, second, second)
    with pytest.raises(LyapunovPruneError, match="repeats itself: 100%"):
        module._require_new("x", first, first, "")
