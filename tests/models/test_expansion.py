"""How far a tokenizer can grow a text, against what the library makes of texts drawn at random."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.tokenizers import GROWTH_LIMIT, expansion, require_bounded, require_bounded_file

LETTERS = st.text("abİﷺ", max_size=4)
REPLACED = st.builds(
    lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content},
    st.one_of(
        st.builds(lambda text: {"String": text}, st.text("abﷺ", min_size=1, max_size=3)),
        st.sampled_from([{"Regex": "a"}, {"Regex": "b+"}, {"Regex": "."}]),
    ),
    LETTERS,
)
PREPENDED = st.builds(lambda text: {"type": "Prepend", "prepend": text}, LETTERS)
BOMB = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}


def tokenizer_json(**steps: Any) -> dict[str, Any]:
    """A tokenizer of two words, with these steps around it."""
    around = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")) | steps
    return json.loads(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()) | around


@given(st.lists(st.one_of(REPLACED, PREPENDED), max_size=4), st.text("abİﷺ", max_size=6))
def test_no_text_is_grown_further(steps: list[dict[str, Any]], text: str) -> None:
    sequence = {"type": "Sequence", "normalizers": steps}
    normalizer = Tokenizer.from_str(json.dumps(tokenizer_json(normalizer=sequence))).normalizer
    a, b = expansion(steps)
    assert len(normalizer.normalize_str(text)) <= a * len(text) + b


def test_a_text_is_grown_as_far() -> None:
    """The bound is reached, or it would refuse what does no harm."""
    normalizer = Tokenizer.from_str(json.dumps(tokenizer_json(normalizer=BOMB))).normalizer
    assert expansion([BOMB]) == (100, 0)
    assert len(normalizer.normalize_str("aaa")) == 300


def test_no_character_decomposes_further() -> None:
    every = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        normalizer = Tokenizer.from_str(json.dumps(tokenizer_json(normalizer={"type": kind}))).normalizer
        longest = max(len(normalizer.normalize_str(character)) for character in every)
        assert longest <= expansion([{"type": kind}])[0]


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def template(count: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [text] * count, "pair": [], "special_tokens": {}}


BOMBS = {
    "in reading": {"normalizer": sequence("normalizers", sequence("normalizers", BOMB, BOMB), BOMB)},
    "in writing": {"decoder": sequence("decoders", BOMB, BOMB, BOMB)},
    "in words": {"pre_tokenizer": sequence("pretokenizers", *[{"type": "ByteLevel"}] * 8)},
    "in front": {"normalizer": {"type": "Prepend", "prepend": "a" * GROWTH_LIMIT}},
    "said again": {"post_processor": template(GROWTH_LIMIT + 1)},
    "decomposed": {"normalizer": sequence("normalizers", *[{"type": "NFKD"}] * 4)},
}


@pytest.mark.parametrize("steps", BOMBS.values(), ids=BOMBS.keys())
def test_a_text_that_can_grow_without_bound_is_refused_before_it_is_read(steps: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(**steps)))
    with pytest.raises(LyapunovPruneError, match="10,000"):
        require_bounded_file(path)


def test_one_that_comes_from_another_file_is_refused_too(tmp_path: Path) -> None:
    content = tokenizer_json(normalizer=sequence("normalizers", BOMB, BOMB, BOMB))
    backend = Tokenizer.from_str(json.dumps(content))
    with pytest.raises(LyapunovPruneError, match=r"1e\+06 characters of one"):
        require_bounded(PreTrainedTokenizerFast(tokenizer_object=backend), tmp_path)


def test_a_map_of_characters_counts_for_its_longest_text(tmp_path: Path) -> None:
    """What SentencePiece writes: the size of the trie, the trie, then texts that end in 0."""
    charsmap = (4).to_bytes(4, "little") + b"\0\0\0\0" + b"abc\0" + "ﷺﷺ".encode() + b"\0"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    assert expansion([step, step]) == (9, 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"normalizer": {"type": "Replace"}}', '{"normalizer": 3}', "[" * 9999])
def test_what_is_no_tokenizer_is_left_to_the_library(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    require_bounded_file(path)
    path.write_text(text)
    require_bounded_file(path)
