"""How far a tokenizer can grow a text: eight replacements of a letter by a hundred others make 10¹⁶ of one.

The library that reads the text ends the process when memory does, and no exception can be caught: it is asked before.
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

LIMIT = 10_000  # those of the families stay under 4,000: ALBERT decomposes, lowers and maps, each for 18 at most
_READING, _WRITING = ("normalizer", "pre_tokenizer", "post_processor"), ("decoder",)
_MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")
# What one character can become: ﷺ is 18 when decomposed by compatibility, İ two in lower case, any four bytes; a
# Chinese one gets a space on both sides, and so does each piece of a word.
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
    """Raise LyapunovPruneError if `path`, a tokenizer.json or none, can grow a text beyond memory.

    To be asked before it is loaded: what it adds to its vocabulary is normalised then.
    """
    try:
        content = parsed(path.read_text(encoding="utf-8"))
        grown = _most(content)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return  # there is none, or the library will say what is wrong with it
    _require(grown, path)


def require_bounded(tokenizer: PreTrainedTokenizerBase, where: Path) -> None:
    """Raise LyapunovPruneError if `tokenizer`, read from whatever file in `where`, can grow a text beyond memory."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        steps = {name: getattr(backend, name) for name in (*_READING, *_WRITING)}
        states = {name: json.loads(step.__getstate__()) for name, step in steps.items() if step is not None}
        _require(_most(states), where)


def expansion(steps: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """(a, b) so that `steps` of a tokenizer.json, one after the other, make at most a·n + b characters of n.

    A replacement of s characters by c: max(1, c / s)·n; of a regular expression, which may match nothing n + 1 times:
    (1 + c)·n + c. A template that names the text k times beside m tokens: k·n + m.
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
    return float(_GROWN.get(kind, 1)), 2.0  # a token at both ends, a space at one


def _longest(charsmap: bytes) -> int:
    """Characters of the longest text in a map of SentencePiece: a trie, its size in front, and texts that end in 0."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _simple(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a sequence of sequences, in their order."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for name in _MEMBERS:
        for member in step.get(name, ()):
            yield from _simple(member)


def _most(content: Mapping[str, Any]) -> float:
    """Characters that one can become, in reading or in writing."""
    return max(
        sum(expansion(step for name in names for step in _simple(content.get(name)))) for names in (_READING, _WRITING)
    )


def _require(grown: float, where: Path) -> None:
    if grown > LIMIT:
        raise LyapunovPruneError(
            f"the tokenizer of {where} can make {grown:.3g} characters of one, {LIMIT:,} at most are taken; give the "
            "model's own"
        )
