"""Text as windows of token ids, with calibration and evaluation kept apart.

A text is cut in two by position: calibration is the first half, evaluation the second, less every
paragraph of the first half that occurs there again. `require_disjoint` and `require_unseen` check the tokens
themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.batch import Split, TokenBatch
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.data.lines import numbered, parsed_line
from lyapunov_prune.errors import LyapunovPruneError, first_line
from lyapunov_prune.models.structure import identify
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.results.history import history_of

# A repeated paragraph shorter than this (a heading, a signature) is no leak.
LEAK_CHARACTERS = 64
# A stretch this long that comes again is a repeat, by chance it would not.
SAMPLE_CHARACTERS = 256
_PARAGRAPH_END = re.compile(r"(\n\s*\n)")


@checked
def load_text(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int = 4096,
    context: int = 512,
    split: Split = "calibration",
    bos: bool | None = None,
    offline: bool = False,
) -> TokenBatch:
    """The first `tokens` tokens of a split, as whole windows of `context` tokens.

    `source`: `builtin` (the language reference that CPython ships), a `.txt` file (any plain text), a
    `.jsonl` file with a `text` field, or a hub data set `name[:config[:split]]` (extra `data`). With
    `bos` every window starts with the BOS token; None follows the tokenizer's own habit.

    Raises LyapunovPruneError when the text is missing, empty or shorter than asked for, when it is one token over and
    over, and for an evaluation half that mostly repeats the first half.
    """
    source = str(source)
    if context < 2:
        raise LyapunovPruneError(f"context {context} is too short to score a token; give 2 or more")
    if tokens < context:
        raise LyapunovPruneError(f"{tokens} tokens do not fill one window of {context}; raise --tokens")
    whole = _read(source, offline)
    if not whole.strip():
        raise LyapunovPruneError(f"{source} holds no text; give another")
    text = _split(whole, split)
    if split == "evaluation":
        _require_new(source, whole, text)
    bos = begins_with_bos(tokenizer, bos)
    width = context - 1 if bos else context
    windows = tokens // context
    # Four characters a token is usual; ten leaves room, and spares tokenizing whole corpora.
    ids = token_ids(tokenizer, text[: 10 * windows * width + 1000])
    if len(ids) < windows * width:
        ids = token_ids(tokenizer, text)
    if len(ids) < windows * width:
        less = ", less what repeats the first half" if split == "evaluation" else ""
        raise LyapunovPruneError(
            f"{source} ({split}{less}) has {len(ids)} tokens and {windows * width} are needed; "
            "lower --tokens or give a longer text"
        )
    matrix = torch.tensor(ids[: windows * width], dtype=torch.int64).view(windows, width)
    flat = matrix.flatten()
    if (flat[1:] == flat[:-1]).float().mean() > 0.5:
        raise LyapunovPruneError(f"{source} ({split}) is one token over and over, no text to measure on; give another")
    if bos:
        matrix = torch.cat([torch.full((windows, 1), tokenizer.bos_token_id), matrix], dim=1)
    return TokenBatch(matrix, text=source, split=split, bos=bos)


def require_unseen(model: PreTrainedModel, batch: TokenBatch | ImageBatch) -> None:
    """Raise LyapunovPruneError if a step that made `model` saw items of `batch`, so that it must not be scored on it.

    Tokens are known by their hash and by runs of 64, whatever file or window they stand in; images by their hashes.
    """
    if isinstance(batch, ImageBatch):
        name, whole, remedy = batch.source, f"{len(batch)} images", "take the final slice, or other images"
    else:
        name, whole = batch.text, f"{batch.tokens} tokens"
        remedy = "use --split evaluation or another --text"
    for number, step in enumerate(history_of(model).steps, start=1):
        for seen in step.saw:
            shared = batch.shared_with(seen)
            if shared:
                raise LyapunovPruneError(
                    f"{identify(model).name} was made with {seen.text} ({seen.split}; step {number} of its history, "
                    f"{step.kind}), which holds about {shared} of the {whole} of {name} ({batch.split}) to score; "
                    f"{remedy}"
                )


def require_source(source: str) -> None:
    """Raise LyapunovPruneError if `source` names nothing, or a file that is not there."""
    if not source.strip():
        raise LyapunovPruneError("the text has no name; give builtin, a .txt, a .jsonl or a data set")
    path = Path(source)
    if not path.is_file() and (path.suffix in {".txt", ".jsonl"} or path.exists()):
        raise LyapunovPruneError(f"{source} is no readable file; give builtin, a .txt, a .jsonl or a data set")


def _read(source: str, offline: bool) -> str:
    path = Path(source)
    if source == "builtin":
        from pydoc_data.topics import topics

        # Topics quote each other: keep the first copy of every paragraph.
        return "\n\n".join(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
        except (OSError, UnicodeDecodeError) as error:
            raise LyapunovPruneError(f"cannot read {source} as UTF-8 text ({error}); convert it to UTF-8") from None
        return _join_jsonl(source, text) if path.suffix == ".jsonl" else text
    require_source(source)
    return _read_dataset(source, offline)


def _join_jsonl(source: str, text: str) -> str:
    documents = []
    for where, line in numbered(source, text):
        try:
            documents.append(parsed_line(line)["text"])
            if not isinstance(documents[-1], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise LyapunovPruneError(
                f'{where} is no JSON object with a "text" string; give {{"text": "…"}} a line'
            ) from None
    return "\n\n".join(documents)


def _read_dataset(source: str, offline: bool) -> str:
    name, _, rest = source.partition(":")
    config, _, part = rest.partition(":")
    if offline:
        raise LyapunovPruneError(f"{source} is no local file and --offline forbids the hub; give builtin or a file")
    try:
        from datasets import load_dataset
    except ImportError:
        raise LyapunovPruneError(
            f"{source} is no local file, and a hub data set needs the extra: pip install 'lyapunov-prune[data]'"
        ) from None
    try:
        data: Any = load_dataset(name, config or None, split=part or "test")
    except Exception as error:  # datasets raises many kinds: network, name, format
        raise LyapunovPruneError(
            f"cannot load the data set {source}: {first_line(error)}; check the name and the network, or give a file"
        ) from None
    if "text" not in data.column_names:
        raise LyapunovPruneError(
            f"{source} has no column text (it has {', '.join(data.column_names)}); give a data set with one"
        )
    return "\n\n".join(data["text"])


def _halves(text: str) -> tuple[str, str]:
    # At a blank line, or a line, or anywhere: a text may have neither.
    middle = len(text) // 2
    for mark in ("\n\n", "\n", " "):
        position = text.find(mark, middle)
        if position != -1 and position < len(text) - len(text) // 4:
            middle = position + len(mark)
            break
    return text[:middle], text[middle:]


def _split(text: str, split: Split) -> str:
    if split == "all":
        return text
    first, second = _halves(text)
    if split == "calibration":
        return first
    if split != "evaluation":
        raise LyapunovPruneError(f"unknown split {split!r}; give calibration, evaluation or all")
    seen = {p.strip() for p in _PARAGRAPH_END.split(first) if len(p) >= LEAK_CHARACTERS}
    return "".join(p for p in _PARAGRAPH_END.split(second) if p.strip() not in seen)


def _require_new(source: str, whole: str, left: str) -> None:
    """Refuse an evaluation half that mostly repeats the first half, by paragraphs (not in `left`) or by samples."""
    first, second = _halves(whole)
    last = max(len(left) - SAMPLE_CHARACTERS, 0)
    samples = [left[i : i + SAMPLE_CHARACTERS] for i in range(0, last + 1, max(last // 15, 1))]
    new = sum(sample not in first for sample in samples) / len(samples) * len(left)
    if new < len(second) / 2:
        raise LyapunovPruneError(
            f"{source} repeats itself: {1 - new / len(second):.0%} of its second half, the evaluation split, stands in "
            "the first too; remove the repeats or give another text"
        )


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, bos: bool | None) -> bool:
    """`bos`, or the tokenizer's own habit where it is None. Raises LyapunovPruneError for a token that it lacks."""
    begins = adds_bos(tokenizer) if bos is None else bos
    if begins and tokenizer.bos_token_id is None:
        raise LyapunovPruneError("this tokenizer has no BOS token; use --no-bos")
    return begins


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer begins every text with its BOS token."""
    ids = token_ids(tokenizer, "a", special=True)
    return tokenizer.bos_token_id is not None and bool(ids) and ids[0] == tokenizer.bos_token_id
