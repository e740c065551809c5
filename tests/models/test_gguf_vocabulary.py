"""What a GGUF file says of a tokenizer: names, kinds and scores as llama.cpp's own converter has them."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
from helpers import VOCABULARY, make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.gguf_vocabulary import vocabulary_values

PREFIX = "tokenizer.ggml."
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(name: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"), BYTES])


def told(tokenizer: PreTrainedTokenizerFast, size: int = len(VOCABULARY)) -> dict[str, Any]:
    return {key.removeprefix(PREFIX): value.read() for key, value in vocabulary_values(tokenizer, size).items()}


def sentencepiece(**normalizer: Any) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: merges over characters, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁a", "▁ab", "aab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "ab"), ("a", "ab")]
    bpe = models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(bpe)
    steps = [normalizers.Prepend("▁")] if normalizer.get("prepends") else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    made.add_tokens([AddedToken("▁▁", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("splitting", "whole", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), False, "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), False, "smollm"),
        (split("llama-bpe"), True, "llama-bpe"),
        (split("llama-bpe"), False, "dbrx"),
        (split("tekken"), True, "tekken"),
        (split("qwen2"), False, "qwen2"),
        (split("gpt-4o"), False, "gpt-4o"),
    ],
)
def test_a_way_to_split_text_has_llama_cpps_name(splitting: Any, whole: bool, name: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = splitting
    tokenizer.backend_tokenizer.model.ignore_merges = whole
    assert told(tokenizer)["pre"] == name


@pytest.mark.parametrize(
    "splitting",
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("x"), "isolated"), BYTES]),
    ],
)
def test_a_way_without_a_name_is_refused(splitting: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = splitting
    with pytest.raises(LyapunovPruneError, match="convert_hf_to_gguf"):
        vocabulary_values(tokenizer, len(VOCABULARY))


def test_tokens_have_their_kinds_and_those_that_lack_are_filled_in() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|tool|>"), AddedToken("think▁", special=False)])
    values = told(tokenizer, len(VOCABULARY) + 3)
    assert values["model"] == "gpt2"
    assert values["tokens"][-4:] == ["th", "<|tool|>", "think ", f"[PAD{len(VOCABULARY) + 2}]"]
    kinds = gguf.TokenType
    assert values["token_type"][-4:] == [kinds.NORMAL, kinds.CONTROL, kinds.USER_DEFINED, kinds.UNUSED]
    assert values["token_type"][:3] == [kinds.CONTROL] * 3
    assert values["merges"] == ["t h"]
    assert (values["bos_token_id"], values["eos_token_id"], values["padding_token_id"]) == (1, 2, 0)
    with pytest.raises(LyapunovPruneError, match="give its own"):
        vocabulary_values(tokenizer, 100)


@pytest.mark.parametrize("prepends", [True, False])
def test_sentencepiece_has_scores_by_the_rank_of_merges(prepends: bool) -> None:
    values = told(sentencepiece(prepends=prepends), 13)
    assert (values["model"], values["pre"], values["add_space_prefix"]) == ("llama", "default", prepends)
    kinds = gguf.TokenType
    assert values["token_type"][:5] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.BYTE, kinds.NORMAL]
    assert values["tokens"][11:] == ["  ", "[PAD12]"]
    assert values["token_type"][11:] == [kinds.USER_DEFINED, kinds.UNUSED]
    scores = dict(zip(values["tokens"], values["scores"], strict=True))
    assert [scores[piece] for piece in ("▁a", "ab", "▁ab", "aab")] == [0, -1, -2, -4]
    assert "merges" not in values


@pytest.mark.parametrize("adds", [True, False])
def test_what_is_put_around_a_text_and_the_template_of_chats(adds: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "x"}
    values = told(tokenizer)
    assert (values["add_bos_token"], values["add_eos_token"]) == (adds, False)
    assert values["tokenizer.chat_template"] == "{{ messages }}"


def test_another_token_around_a_text_is_refused() -> None:
    tokenizer = make_tokenizer()
    word = tokenizer.convert_ids_to_tokens(5)
    around = processors.TemplateProcessing(single=f"$A {word}", special_tokens=[(word, 5)])
    tokenizer.backend_tokenizer.post_processor = around
    with pytest.raises(LyapunovPruneError, match="BOS and EOS around"):
        vocabulary_values(tokenizer, len(VOCABULARY))


def test_other_models_of_tokenizers_are_refused() -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.decoder = decoders.Metaspace()
    with pytest.raises(LyapunovPruneError, match="the tokenizer is Unigram"):
        vocabulary_values(PreTrainedTokenizerFast(tokenizer_object=unigram), 2)
    with pytest.raises(LyapunovPruneError, match="no fast tokenizer"):
        vocabulary_values(None, 2)
