"""Which tokenizers give one text the same ids, however they are written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import VOCABULARY, make_tokenizer
from transformers import AddedToken, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.tokenizers import require_same_ids, require_same_tokenizer

NAMES = ("dense", "pruned")


def rewritten(folder: Path, change: Callable[[Any], None]) -> PreTrainedTokenizerBase:
    """The tokenizer of the tests after `change` of its tokenizer.json."""
    make_tokenizer().save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


def permuted(content: Any) -> None:
    names = VOCABULARY[:3] + VOCABULARY[-2:2:-1] + VOCABULARY[-1:]
    content["model"]["vocab"] = {name: i for i, name in enumerate(names)}


def unmerged(content: Any) -> None:
    content["model"]["merges"] = []


def lowercase(content: Any) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def composed(content: Any) -> None:
    content["normalizer"] = {"type": "NFC"}


def prefixed(content: Any) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def adds_bos(content: Any) -> None:
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }


def strips(content: Any) -> None:
    for token in content["added_tokens"]:
        token["lstrip"] = True


def in_words(content: Any) -> None:
    for token in content["added_tokens"]:
        token["single_word"] = True


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (permuted, r"token '!' has id 3 and id 258"),
        (unmerged, "their merges or scores are not the same"),
        (lowercase, "the ids of 'Hello world' are not the same"),
        (composed, "the ids of 'STRASSE .* are not the same"),
        (prefixed, "the ids of 'Hello world' are not the same"),
        (adds_bos, "the ids of 'Hello world' are not the same"),
        (strips, "the ids of ' x .*<s> x .* are not the same"),
        (in_words, "the ids of 'x.*<s>x.* are not the same"),
    ],
)
def test_what_gives_other_ids_is_named_in_one_line(
    change: Callable[[Any], None], difference: str, tmp_path: Path
) -> None:
    message = rf"^dense and pruned have different tokenizers \({difference}\)"
    with pytest.raises(LyapunovPruneError, match=message):
        require_same_tokenizer(make_tokenizer(), rewritten(tmp_path, change), NAMES)


def test_an_id_that_is_another_token_is_named(tmp_path: Path) -> None:
    mine, other = make_tokenizer(), rewritten(tmp_path, permuted)
    with pytest.raises(LyapunovPruneError, match=r"dense and pruned have different vocabularies \(id 3 is"):
        require_same_ids(mine, other, NAMES, len(VOCABULARY))
    require_same_ids(mine, other, NAMES, 3)
    other = make_tokenizer()
    other.add_tokens(["<more>"])
    require_same_ids(mine, other, NAMES, len(VOCABULARY) + 1)


def test_tokens_that_one_alone_has_are_named() -> None:
    more = make_tokenizer()
    more.add_tokens([AddedToken("<new>")])
    with pytest.raises(LyapunovPruneError, match=r"'<new>' .*260"):
        require_same_tokenizer(make_tokenizer(), more, NAMES)


def test_another_bos_token_is_named() -> None:
    other = make_tokenizer(bos_token="</s>", eos_token="</s>", pad_token="<pad>")
    with pytest.raises(LyapunovPruneError, match=r"BOS token .*1 .*2"):
        require_same_tokenizer(make_tokenizer(), other, NAMES)


def nothing(content: Any) -> None:
    """Saved and loaded, as a pruned checkpoint is."""


def another_version(content: Any) -> None:
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [content["pre_tokenizer"]]}
    content["post_processor"] = {**content["decoder"], "trim_offsets": False}


def shortened(content: Any) -> None:
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["decoder"] = None


@pytest.mark.parametrize("change", [nothing, another_version, shortened])
def test_the_same_written_in_another_way_is_the_same(change: Callable[[Any], None], tmp_path: Path) -> None:
    require_same_tokenizer(make_tokenizer(), rewritten(tmp_path, change), NAMES)


def test_what_gives_no_text_other_ids_does_not_count(tokenizer: PreTrainedTokenizerFast) -> None:
    other = make_tokenizer()
    other.model_max_length, other.padding_side, other.chat_template = 7, "left", "{{ messages }}"
    other.name_or_path, other.pad_token = "elsewhere", "</s>"
    other("a long text", truncation=True, max_length=2, padding="max_length")
    require_same_tokenizer(tokenizer, other, NAMES)


def test_tokenizers_in_python_are_compared() -> None:
    require_same_tokenizer(ByT5Tokenizer(), ByT5Tokenizer(), NAMES)
    with pytest.raises(LyapunovPruneError, match=r"'<extra_id_100>' .*359"):
        require_same_tokenizer(ByT5Tokenizer(), ByT5Tokenizer(extra_ids=10), NAMES)
    with pytest.raises(LyapunovPruneError, match="different tokenizers"):
        require_same_tokenizer(ByT5Tokenizer(), make_tokenizer(), NAMES)


@pytest.mark.xdist_group("smollm2")
def test_the_built_in_model_reads_as_its_saved_copy(smollm2: Decoder, tmp_path: Path) -> None:
    smollm2.tokenizer.save_pretrained(tmp_path)
    require_same_tokenizer(smollm2.tokenizer, AutoTokenizer.from_pretrained(tmp_path), NAMES)
