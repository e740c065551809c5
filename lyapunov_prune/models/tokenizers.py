"""Whether two models read text alike: one text gives both the same ids, and one id is the same token to both."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError, first_line

# A chat template that writes today's date would give other tokens tomorrow.
_NO_DAY = "{%- macro strftime_now(form) -%}2026-01-01{%- endmacro -%}"
# What normalisers and the cutting into words differ in; each text begins anew, where some put a space or a BOS token.
_PROBES = (
    "Hello world",
    " Two  spaces,\ttabs\t\tand\r\nlines\n\n\n   indented ",
    "I'll, we'LL, don't; it's 3.14, 1,000 and 20260131",
    "def f(x_1):\n    return {'a': x_1 ** 2}  # https://example.org/?q=%20",
    "STRASSE straße İstanbul naïve cafe\u0301 café ﬁ ½ Ａ１ \u00a0\u2003\u200b",
    "日本語のテキスト 한국어 العربية हिन्दी ไทย 👩‍👩‍👧 🇫🇷 ▁ Ġ ## \ufffd",
)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """The ids of `text`, with what the tokenizer puts around a text only where `special`.

    Raises LyapunovPruneError when it cannot: its vocabulary lacks its own unknown token, or it wants words, not text.
    """
    try:
        return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        raise LyapunovPruneError(
            f"the tokenizer cannot read {text[:20]!r} ({type(error).__name__}: {error}); give the model's own, whole"
        ) from error


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str, *, answer: bool = False
) -> str:
    """A chat as the tokenizer's own template writes it; with `answer` up to where the model's answer begins.

    Raises LyapunovPruneError, naming `where` the chat stands, for a chat that the template refuses.
    """
    try:
        template = _NO_DAY + tokenizer.get_chat_template()
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=answer
            )
        )
    except Exception as error:  # jinja's, and whatever the template raises
        raise LyapunovPruneError(
            f"the chat template cannot write {where} ({first_line(error)}); remove that chat or give another text"
        ) from None


def require_same_tokenizer(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, names: tuple[str, str]
) -> None:
    """Raise LyapunovPruneError naming the first difference that can give one text other ids.

    Compared are the vocabularies with their ids, the merges or scores, the BOS token, and the ids of texts on which
    normalisers, pre-tokenizers and added tokens differ: how these are written down changes between versions of
    transformers, and what they do does not. Padding, truncation, decoding and the chat template give no text other ids.
    """
    difference = _difference(first, second)
    if difference:
        raise LyapunovPruneError(
            f"{names[0]} and {names[1]} have different tokenizers ({difference}); give two models that share one"
        )


def require_same_ids(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, names: tuple[str, str], size: int
) -> None:
    """Raise LyapunovPruneError for an id below `size` that is another token to the two models of these `names`.

    Enough where both models are given the same ids: what is in a GGUF file may cut a text in other ways, and name
    special tokens that the folder does not.
    """
    mine, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (first, second))
    for i in sorted(mine.keys() & theirs.keys()):
        if i < size and mine[i] != theirs[i]:
            raise LyapunovPruneError(
                f"{names[0]} and {names[1]} have different vocabularies (id {i} is {mine[i]!r} and {theirs[i]!r}); "
                "give two versions of one model"
            )


def _difference(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> str:
    mine, theirs = first.get_vocab(), second.get_vocab()
    if mine != theirs:
        token = min(token for token, _ in mine.items() ^ theirs.items())
        return f"token {token!r} has {_id(mine.get(token))} and {_id(theirs.get(token))}"
    if first.bos_token_id != second.bos_token_id:
        return f"the BOS token has {_id(first.bos_token_id)} and {_id(second.bos_token_id)}"
    rules = [_rules(tokenizer) for tokenizer in (first, second)]
    if None not in rules and rules[0] != rules[1]:
        return "their merges or scores are not the same"
    added = ["", *sorted(first.get_added_vocab()), ""]
    for text in (*_PROBES, " x ".join(added), "x".join(added)):  # apart, and as parts of words
        if token_ids(first, text, special=True) != token_ids(second, text, special=True):
            return f"the ids of {text[:40]!r} are not the same"
    return ""


def _id(value: int | None) -> str:
    return "no id" if value is None else f"id {value}"


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """How pieces become tokens: the merges of BPE, the scores of Unigram; None where no fast backend tells."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    return model.get("merges"), model["vocab"]
