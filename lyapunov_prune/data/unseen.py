"""Refuse to score a model on texts, images, items or documents that a step that made it has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.data.batch import ITEM_TOKENS, TokenBatch
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import model_name
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.results.history import history_of
from lyapunov_prune.results.overlap import shared_tokens
from lyapunov_prune.results.result import MeasuredOn


def require_unseen(model: PreTrainedModel, batch: TokenBatch | ImageBatch) -> None:
    """Raise LyapunovPruneError if a step that made `model` saw items of `batch`.

    Tokens are recognised by their hash and by runs of 64, in any file or window; images by their hashes.
    """
    if isinstance(batch, ImageBatch):
        name, whole, remedy = batch.source, f"{len(batch)} images", "take the final slice, or other images"
    else:
        name, whole = batch.text, f"{batch.tokens} tokens"
        remedy = "give another text" if batch.split == "evaluation" else "take its evaluation half, or another text"
    for seen, by in _saw(model):
        shared = batch.shared_with(seen)
        if shared:
            raise LyapunovPruneError(
                f"{by}, which holds about {shared} of the {whole} of {name} ({batch.split}) to score; {remedy}"
            )


def require_unseen_items(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Sequence[str]],
    source: str,
    what: str = "items",
) -> None:
    """Raise LyapunovPruneError if a step that made `model` saw one of `items`, each given as its strings.

    An item counts as seen if at least four fifths of one of its strings occur in the step's text, by runs of
    `ITEM_TOKENS`; only strings at least half as long as the longest count. Strings of `ITEM_TOKENS + 7` tokens are
    always found in texts of up to about 33,000 tokens, and mostly in longer ones; strings below `ITEM_TOKENS` cannot be
    recognised.
    """
    saw = [(seen, by) for seen, by in _saw(model) if seen.short is not None]
    rows = [[token_ids(tokenizer, string) for string in strings] for strings in items] if saw else []
    for seen, by in saw:
        known = [place for place, strings in enumerate(rows) if _is_known(strings, seen)]
        if known:
            raise LyapunovPruneError(
                f"{by}, which holds {len(known)} of the {len(items)} {what} of {source} to score, the first "
                f"{max(items[known[0]], key=len)[:40]!r}; leave them out, or give others"
            )


def strings_of(item: Any) -> Iterator[str]:
    """All strings in an item of lists and dictionaries."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict):
        yield from strings_of(list(item.values()))
    elif isinstance(item, list | tuple):
        for part in item:
            yield from strings_of(part)


def _saw(model: PreTrainedModel) -> Iterator[tuple[MeasuredOn, str]]:
    """What each step that made `model` saw, with a phrase that describes it."""
    name = model_name(model)
    for number, step in enumerate(history_of(model).steps, start=1):
        for seen in step.saw:
            where = f"{seen.split}; step {number} of its history, {step.kind}"
            yield seen, f"{name} was made with {seen.text} ({where})"


def _is_known(strings: Sequence[Sequence[int]], seen: MeasuredOn) -> bool:
    assert seen.short is not None
    longest = max(map(len, strings), default=0)
    for row in strings:
        if ITEM_TOKENS <= len(row) >= longest / 2:
            new = len(row) - shared_tokens(np.array(row), seen.short)
            # At either end of a seen text, up to one stride of tokens is in no stored run.
            if new <= min(max(len(row) / 5, 2 * seen.short.stride), len(row) / 2):
                return True
    return False
