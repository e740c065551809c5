"""Whether two models tokenise alike, and how far a tokenizer can grow a text.

Two models tokenise alike if each text has the same ids for both, and each id is the same token. Eight replacements of a
letter by a hundred others make 10¹⁶ letters of one: the tokenizers library aborts the process when memory runs out,
which no `except` can catch, so the growth is bounded before it runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.results.files import parsed

# A chat template that writes today's date would give other tokens tomorrow, so the date is fixed.
_NO_DAY = "{%- macro strftime_now(form) -%}2026-01-01{%- endmacro -%}"
# Texts on which normalisers and pre-tokenizers differ. Each is tokenised alone, since some put a space or BOS in front.
_PROBES = (
    "Hello world",
    " Two  spaces,\ttabs\t\tand\r\nlines\n\n\n   indented ",
    "I'll, we'LL, don't; it's 3.14, 1,000 and 20260131",
    "def f(x_1):\n    return {'a': x_1 ** 2}  # https://example.org/?q=%20",
    "STRASSE straße İstanbul naïve cafe\u0301 café ﬁ ½ Ａ１ \u00a0\u2003\u200b",
    "日本語のテキスト 한국어 العربية हिन्दी ไทย 👩‍👩‍👧 🇫🇷 ▁ Ġ ## \ufffd",
)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """The ids of `text`, with the tokenizer's special tokens around it only if `special`.

    Raises LyapunovPruneError if it fails: its vocabulary lacks its own unknown token, or it takes words instead of
    text.
    """
    try:
        return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic in the tokenizers library is not an Exception
        raise LyapunovPruneError(
            f"the tokenizer cannot read {text[:20]!r} ({type(error).__name__}: {error}); give the model's own, "
            "complete tokenizer"
        ) from error


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    where: str,
    *,
    answer: bool = False,
    tools: list[Any] | None = None,
    **settings: Any,
) -> str:
    """A chat written by the tokenizer's own template; with `answer`, up to where the model's answer begins.

    `tools` are JSON schemas of functions, `settings` what else the template knows. Raises LyapunovPruneError for a chat
    that the template refuses; `where` says in the message where the chat is.
    """
    what = f"the chat template cannot write {where}"
    with reported(what, "remove that chat or give another text", Exception):  # jinja's, and any that it raises
        template = _NO_DAY + tokenizer.get_chat_template(tools=tools)  # some have another one for tools
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=answer,
                **settings,
            )
        )


def require_same_tokenizer(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, names: tuple[str, str]
) -> None:
    """Raise LyapunovPruneError, naming the first difference, if one text can have different ids.

    Compares the vocabularies with their ids, merges or scores, the BOS token, and the ids of texts on which
    normalisers, pre-tokenizers and added tokens differ; the definitions of these vary between versions of transformers,
    but not their effect. Padding, truncation, decoding and the chat template change no ids.
    """
    difference = _difference(first, second)
    if difference:
        raise LyapunovPruneError(
            f"{names[0]} and {names[1]} have different tokenizers ({difference}); give two models that share one"
        )


def require_same_ids(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, names: tuple[str, str], size: int
) -> None:
    """Raise LyapunovPruneError if an id below `size` is another token in the second model; `names` name both.

    This suffices if both models are given the same ids: a GGUF file may split text differently and name special tokens
    that the folder does not.
    """
    mine, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (first, second))
    for i in sorted(mine.keys() & theirs.keys()):
        if i < size and mine[i] != theirs[i]:
            raise LyapunovPruneError(
                f"{names[0]} and {names[1]} have different vocabularies (id {i} is {mine[i]!r} and {theirs[i]!r}); "
                "give two versions of one model"
            )


def _difference(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> str | None:
    mine, theirs = first.get_vocab(), second.get_vocab()
    if mine != theirs:
        token = min(token for token, _ in mine.items() ^ theirs.items())
        return f"token {token!r} has {_id(mine.get(token))} and {_id(theirs.get(token))}"
    if first.bos_token_id != second.bos_token_id:
        return f"the BOS token has {_id(first.bos_token_id)} and {_id(second.bos_token_id)}"
    rules = [_rules(tokenizer) for tokenizer in (first, second)]
    if None not in rules and rules[0] != rules[1]:
        return "their merges or scores are not the same"
    return different_ids(first, second)


def different_ids(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> str | None:
    """The first text on which normalisers, pre-tokenizers, added tokens or BOS and EOS differ, in words."""
    added = ["", *sorted(first.get_added_vocab()), ""]
    for text in (*_PROBES, " x ".join(added), "x".join(added)):  # separate, and as parts of words
        if token_ids(first, text, special=True) != token_ids(second, text, special=True):
            return f"the ids of {text[:40]!r} are not the same"
    return None


def _id(value: int | None) -> str:
    return "no id" if value is None else f"id {value}"


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """How pieces become tokens: the merges of BPE or the scores of Unigram; None without a fast backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    return model.get("merges"), model["vocab"]


GROWTH_LIMIT = (
    10_000  # known families stay below 4,000: ALBERT decomposes, lowercases and maps characters, up to 18-fold each
)
_READING, _WRITING = ("normalizer", "pre_tokenizer", "post_processor"), ("decoder",)
_MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")
# The most characters that one can become: compatibility decomposition makes 18 of ﷺ, lowercasing 2 of İ, a byte-level
# step 4 bytes of any. BERT adds spaces around Chinese characters, and some decoders one before each piece of a word.
_GROWN = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 36,
    "ByteLevel": 4,
    "Metaspace": 2,
    "BPEDecoder": 2,
    "CTC": 2,
    "WordPiece": 2,
}


def require_bounded_file(path: Path) -> None:
    """Raise LyapunovPruneError if the tokenizer.json at `path`, if there is one, can grow a text beyond memory.

    Call it before loading, which already normalises the added vocabulary.
    """
    try:
        content = parsed(path.read_text(encoding="utf-8"))
        grown = _most(content)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return  # missing, or the library reports the fault
    _require(grown, path)


def require_bounded(tokenizer: PreTrainedTokenizerBase, where: Path) -> None:
    """Raise LyapunovPruneError if `tokenizer`, read from a file in `where`, can grow a text beyond memory."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        steps = {name: getattr(backend, name) for name in (*_READING, *_WRITING)}
        states = {name: json.loads(step.__getstate__()) for name, step in steps.items() if step is not None}
        _require(_most(states), where)


def expansion(steps: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """(a, b) such that `steps` of a tokenizer.json, run in sequence, turn n characters into at most a·n + b.

    Replacing s characters by c: max(1, c / s)·n. Replacing a regular expression, which may match nothing n + 1 times:
    (1 + c)·n + c. A template with the text k times and m tokens: k·n + m.
    """
    a, b = 1.0, 0.0
    for step in steps:
        factor, added = _expansion(step)
        a, b = factor * a, factor * b + added
    return a, b


def _expansion(step: Mapping[str, Any]) -> tuple[float, float]:
    kind = step["type"]
    if kind == "Replace":
        length, pattern = len(step["content"]), step["pattern"]
        replaced = len(pattern.get("String", ""))
        return (max(1.0, length / replaced), 0.0) if replaced else (1.0 + length, float(length))
    if kind == "Prepend":
        return 1.0, float(len(step["prepend"]))
    if kind == "Precompiled":
        # A SentencePiece map: the size of a trie, the trie, and zero-terminated texts, of which one may be put.
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return float(max(1, *(len(text.decode(errors="replace")) for text in texts))), 0.0
    if kind == "TemplateProcessing":
        put = [part["SpecialToken"]["id"] for part in step["single"] if "SpecialToken" in part]
        tokens = sum(len(step["special_tokens"][name]["ids"]) for name in put)
        return float(len(step["single"]) - len(put)), float(tokens)
    return float(_GROWN.get(kind, 1)), 2.0  # a token at both ends, or a space at one


def _simple(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of nested sequences, flattened in order."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for name in _MEMBERS:
        for member in step.get(name, ()):
            yield from _simple(member)


def _most(content: Mapping[str, Any]) -> float:
    """The most characters that one character can become, in encoding or decoding."""
    return max(
        sum(expansion(step for name in names for step in _simple(content.get(name)))) for names in (_READING, _WRITING)
    )


def _require(grown: float, where: Path) -> None:
    if grown > GROWTH_LIMIT:
        raise LyapunovPruneError(
            f"the tokenizer of {where} can make {grown:.3g} characters of one, {GROWTH_LIMIT:,} at most are taken; "
            "give the model's own"
        )
