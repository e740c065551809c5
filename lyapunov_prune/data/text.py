"""Text as windows of token ids, with calibration and evaluation kept apart.

A text is cut in two by position: calibration is the first half, evaluation the second without the paragraphs that also
occur in the first. `batch.require_disjoint` and `unseen.require_unseen` compare the tokens themselves.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import Range, checked
from lyapunov_prune.data.batch import Split, TokenBatch, whole_windows
from lyapunov_prune.data.documents import Chats, PlainText, documents
from lyapunov_prune.data.rows import ENCODING, file_rows, holds_rows, hub_rows, text_of
from lyapunov_prune.data.sources import BUILTIN, OWN, parts_of, require_source
from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models.tokenizers import token_ids

# A sample of this length that occurs again is a repeat, not chance.
SAMPLE_CHARACTERS = 256
# Of the standard library, in every supported Python; none is part of a text that experiments report on.
_MODULES = (
    *("configparser", "dataclasses", "doctest", "enum", "inspect"),
    *("ipaddress", "optparse", "pickle", "shutil", "subprocess"),
)


@checked
def load_text(
    source: str | Path | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int = 4096,
    context: Annotated[int, Range(2)] = 512,
    split: Split = "calibration",
    bos: bool | None = None,
) -> TokenBatch:
    """The first `tokens` tokens of a split, as whole windows of `context` tokens.

    `source` is a list of texts, `builtin` (the language reference in CPython), `code` (modules of Python's standard
    library), a `.txt` file (any plain text), a file of rows (`.jsonl`, `.json`, `.csv`, `.tsv`, and with the extra
    `data` `.parquet`, `.arrow`), or a hub data set `name[:config[:split]]` (extra `data`). `FILE:COLUMN` or
    `name:config:split:COLUMN` names the column to read; without one it is `text`, `messages`, `conversations`, or
    Alpaca's `instruction`, `input`, `output` (`documents`). Chats are written by the tokenizer's chat template, and the
    batch's `text` says so. With `bos`, every window starts with one BOS token, its own if the template wrote one there;
    None follows the tokenizer.

    Raises LyapunovPruneError if the text is missing, empty, too short, or one repeated token, and for an evaluation
    half that mostly repeats the first half.
    """
    given = list(source) if not isinstance(source, str | Path) else None
    source = str(source) if given is None else f"{len(given)} texts"
    windows = whole_windows(tokens, context)
    whole = _read(source, tokenizer) if given is None else PlainText(source, "\n\n".join(given))
    blank = not whole.content.strip()
    part = whole if blank else _split(source, whole, split)
    bos = begins_with_bos(tokenizer, bos)
    # About four characters per token are usual; ten leave room, without tokenising a whole corpus.
    for characters in (10 * windows * context + 1000, None):
        ids = token_ids(tokenizer, part.text(characters))
        rows = _rows(ids, windows, context, _start_token(tokenizer) if bos else None)
        if len(rows) == windows:
            break
    flat = torch.tensor(ids[: windows * context], dtype=torch.int64)
    less = ", less what repeats the first half" if split == "evaluation" else ""
    wrong = {
        "holds no text; give another": blank,
        f"has {len(ids)} tokens and {windows * (context - bos)} are needed; lower --tokens or give a longer text": (
            len(rows) < windows
        ),
        "is one token over and over, no text to measure on; give another": (flat[1:] == flat[:-1]).float().mean() > 0.5,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{source} ({split}{less}) {why}")
    return TokenBatch(torch.tensor(rows, dtype=torch.int64), text=whole.name, split=split, bos=bos)


def _rows(ids: list[int], windows: int, context: int, start: int | None) -> list[list[int]]:
    """The first `windows` windows of `context` ids, or as many as there are, each with one `start` token in front."""
    rows: list[list[int]] = []
    at = 0
    while len(rows) < windows:
        own = [] if start is None or ids[at : at + 1] == [start] else [start]
        row = own + ids[at : at + context - len(own)]
        if len(row) < context:
            break
        rows.append(row)
        at += context - len(own)
    return rows


def _read(source: str, tokenizer: PreTrainedTokenizerBase) -> PlainText | Chats:
    require_source(source)
    name, column = parts_of(source)
    path = Path(name)
    if name in OWN:
        return PlainText(name, _builtin() if name == BUILTIN else _code())
    if not path.is_file():
        return documents(hub_rows(name), tokenizer, column)
    return (
        documents(file_rows(path), tokenizer, column) if holds_rows(path) else PlainText(name, text_of(path, ENCODING))
    )


def _builtin() -> str:
    from pydoc_data.topics import topics

    # Topics quote each other, so only the first copy of a paragraph is kept.
    return "\n\n".join(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))


def _code() -> str:
    specs = filter(None, map(importlib.util.find_spec, _MODULES))
    sources = (s.loader.get_source(s.name) for s in specs if isinstance(s.loader, importlib.abc.InspectLoader))
    return "\n\n".join(filter(None, sources))


def _split(source: str, whole: PlainText | Chats, split: Split) -> PlainText | Chats:
    if split == "all":
        return whole
    if split == "calibration":
        return whole.halves()[0]
    first, second, left = whole.held_out()
    _require_new(source, first.content, second.content, left.content)
    return left


def _require_new(source: str, first: str, second: str, left: str) -> None:
    """Refuse an evaluation half that mostly repeats the first half, by paragraphs (not in `left`) or samples."""
    last = max(len(left) - SAMPLE_CHARACTERS, 0)
    samples = [left[i : i + SAMPLE_CHARACTERS] for i in range(0, last + 1, max(last // 15, 1))]
    new = sum(sample not in first for sample in samples) / len(samples) * len(left)
    if new < len(second) / 2:
        raise LyapunovPruneError(
            f"{source} repeats itself: {1 - new / len(second):.0%} of its second half (the evaluation split) occurs in "
            "the first; remove the repeats or give another text"
        )


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, bos: bool | None) -> bool:
    """`bos`, or the tokenizer's default if it is None. Raises LyapunovPruneError if there is no BOS token."""
    begins = adds_bos(tokenizer) if bos is None else bos
    if begins and _start_token(tokenizer) is None:
        raise LyapunovPruneError("this tokenizer has no BOS token; use bos=False")
    return begins


def _start_token(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The BOS token, or for want of one CLS."""
    return tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer starts every text with its BOS token, or with CLS if it has none."""
    ids = token_ids(tokenizer, "a", special=True)
    return _start_token(tokenizer) is not None and bool(ids) and ids[0] == _start_token(tokenizer)


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What stands before a text that is tokenised in parts: the BOS token, if the tokenizer adds one."""
    return [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
