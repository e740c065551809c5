"""Own prompts: what is read, what a model is given of them, and that lengths change no number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers import make_tokenizer
from pyarrow import parquet
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError, compress, load_text, probe_layers
from lyapunov_prune.data import load_prompts
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.predictions.generation import compare_generation

TEXTS = ["one two three", "the thing is this", "four and five", "ab", "xy"]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant:{% endif %}"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("\n\n".join(TEXTS) + "\r\n", encoding="utf-8")
    return path


def test_each_line_is_a_prompt_of_its_own_length(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    found = load_prompts(file, tokenizer)
    own = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert [found.item(i).tolist() for i in range(len(found))] == own
    assert found.stream.tolist() == [token for row in own for token in row]
    assert found.tokens == sum(map(len, own))
    assert [w.tolist() for w in found.windows(8)] == [[own[0]], [own[1]], [own[2]], own[3:]]
    assert [len(w) for w in found.windows(1)] == [1] * 5
    jsonl = file.with_suffix(".jsonl")
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert load_prompts(jsonl, tokenizer).text_hash == found.text_hash
    assert found.take([3, 0]).item(1).tolist() == own[0]
    assert found.take([3, 0]).text_hash != found.text_hash


def test_what_is_repeated_at_the_end_of_a_row_is_not_in_the_hash_of_another(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    hashes = set()
    for k, lines in enumerate(("abb\nabc", "ab\nabc")):
        (tmp_path / f"{k}.txt").write_text(lines)
        hashes.add(load_prompts(tmp_path / f"{k}.txt", tokenizer).text_hash)
    assert len(hashes) == 2


def test_bos_stands_where_it_is_asked_for(file: Path) -> None:
    own = len(make_tokenizer()(TEXTS[0])["input_ids"])
    for adds, bos, begins in ((False, None, False), (True, None, True), (True, False, False), (False, True, True)):
        found = load_prompts(file, make_tokenizer(adds_bos=adds), bos=bos)
        assert (found.ids[:, 0] == 1).all() == begins == found.bos
        assert found.lengths[0] == own + begins
        assert 1 not in found.stream


def test_the_chat_template_frames_every_prompt(file: Path) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    with pytest.raises(LyapunovPruneError, match="no chat template"):
        load_prompts(file, tokenizer, chat=True)
    tokenizer.chat_template = TEMPLATE
    found = load_prompts(file, tokenizer, chat=True)
    assert tokenizer.decode(found.item(0)) == f"<s>user: {TEXTS[0]} assistant:"  # one BOS, the template's
    assert found.bos is True
    with pytest.raises(LyapunovPruneError, match="leave out bos"):
        load_prompts(file, tokenizer, chat=True, bos=False)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_chat_is_asked_up_to_its_last_answer(name: str, column: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    said = [("user", "one two"), ("assistant", "three"), ("user", "four"), ("assistant", "five")]
    keys = ("role", "content") if column == "messages" else ("from", "value")
    rows = [{column: [dict(zip(keys, turn, strict=True)) for turn in said[:n]]} for n in (4, 3, 1)]
    if name == "x.parquet":
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(LyapunovPruneError, match="no chat template"):
        load_prompts(tmp_path / name, tokenizer)
    tokenizer.chat_template = TEMPLATE
    found = load_prompts(tmp_path / name, tokenizer, chat=True)
    asked = "<s>user: one two<s>assistant: three<s>user: four assistant:"
    assert [tokenizer.decode(found.item(i)) for i in range(3)] == [asked, asked, "<s>user: one two assistant:"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("bad.jsonl", '{"prompt": "x"}\n', "text, messages, conversations .it has prompt"),
        ("none.txt", " \n\n", "holds no prompts"),
        ("short.txt", "good one\na\n", "line 2 .*fewer than two"),
        ("bad.jsonl", '{"text": "good one"}\n{"prompt": "x"}\n', "line 2 is no prompt"),
        ("bad.jsonl", '{"text": 3}\n', "line 1 is no prompt"),
        ("bad.jsonl", "plain\n", "line 1 is no JSON object"),
        ("deep.jsonl", '{"text": ' + "[" * 100_000, "line 1 is no JSON object"),
        ("half.jsonl", '{"text": "good \\ud800 one"}\n', "line 1 is no JSON object"),
        ("missing.txt", None, "cannot read"),
    ],
)
def test_what_is_no_file_of_prompts_is_one_line(
    name: str, content: str | None, told: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(LyapunovPruneError, match=told) as caught:
        load_prompts(tmp_path / name, tokenizer)
    assert "\n" not in str(caught.value)


def test_measurements_are_means_of_every_prompt_by_itself(
    file: Path, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Against one prompt at a time, without anything repeated: of unequal lengths the same mean."""
    prompts = load_prompts(file, tokenizer)
    alone = [prompts.item(i)[None] for i in range(len(prompts))]
    other = compress(reader, method="rtn", bits=4).model
    for batch_size in (1, 2):
        whole = probe_layers(reader, prompts, steps=3, change=other, batch_size=batch_size)
        each = [probe_layers(reader, ids, steps=3, change=other) for ids in alone]
        np.testing.assert_allclose(whole.kl, np.mean([p.kl for p in each], 0), rtol=1e-4)
        np.testing.assert_allclose(whole.deviation, np.max([p.deviation for p in each], 0), rtol=1e-4)
    written = compare_generation(reader, other, prompts, steps=4)
    singles = [compare_generation(reader, other, ids, steps=4) for ids in alone]
    assert written.dense_tokens == tuple(s.dense_tokens[0] for s in singles)
    assert written.compressed_tokens == tuple(s.compressed_tokens[0] for s in singles)
    np.testing.assert_allclose(written.kl[0], np.mean([s.kl[0] for s in singles]), rtol=1e-4)
    by_draws = [compare_generation(reader, other, prompts, steps=4, seed=1, batch_size=size) for size in (1, 2, 8)]
    assert len({sampled.dense_tokens for sampled in by_draws}) == 1
    assert whole.measured_on.tokens == sum(prompts.lengths)


def test_windows_of_a_text_are_as_before(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = load_text("builtin", tokenizer, tokens=64, context=16)
    assert isinstance(batch, TokenBatch)
    assert torch.equal(torch.cat(batch.windows(3)), batch.ids)
    assert [len(w) for w in batch.windows(3)] == [3, 1]
