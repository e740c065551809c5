"""How far a tokenizer can grow a text: eight replacements of a letter by a hundred others make 10¹⁶ letters of one.

The tokenizers library aborts the process when memory runs out, which no `except` can catch, so the growth is bounded
before it runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.results.files import parsed

LIMIT = 10_000  # known families stay below 4,000: ALBERT decomposes, lowercases and maps characters, up to 18-fold each
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
        return float(_longest(base64.b64decode(step["precompiled_charsmap"]))), 0.0
    if kind == "TemplateProcessing":
        put = [part["SpecialToken"]["id"] for part in step["single"] if "SpecialToken" in part]
        tokens = sum(len(step["special_tokens"][name]["ids"]) for name in put)
        return float(len(step["single"]) - len(put)), float(tokens)
    return float(_GROWN.get(kind, 1)), 2.0  # a token at both ends, or a space at one


def _longest(charsmap: bytes) -> int:
    """Characters of the longest text in a SentencePiece map: size of a trie, the trie, zero-terminated texts."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


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
    if grown > LIMIT:
        raise LyapunovPruneError(
            f"the tokenizer of {where} can make {grown:.3g} characters of one, {LIMIT:,} at most are taken; give the "
            "model's own"
        )
