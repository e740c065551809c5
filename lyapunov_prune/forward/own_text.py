"""Text to learn from where there is none: what the dense model writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked, require_least
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.decoding import draws_of, sample
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.structure import identify, in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.results.store import Store


@checked
@in_eval_mode
def self_generated(
    model: PreTrainedModel,
    *,
    tokens: int = 25600,
    context: int = 256,
    seed: int = 0,
    batch_size: int = 16,
    folder: str | Path | None = None,
    resume: bool = False,
) -> TokenBatch:
    """Windows that `model` writes: its BOS token, then tokens drawn from its own predictions, `x_t ~ softmax(z_{t−1})`.

    As many whole windows of `context` as `tokens` hold, (windows × context) int64; a text that ends in one is followed
    by another. Draws are of `seed` and the window, so that `batch_size` changes nothing but rounding. It holds nothing
    that the model does not believe itself, and no text that others are scored on but by chance, or learnt by heart.
    Finished windows are kept in `folder` and with `resume` not written again.

    Raises LyapunovPruneError for a model without a BOS or end-of-text token to begin with, a context of less than two
    tokens or longer than the model's, fewer tokens than one window, and what is not finite, naming the step.
    """
    require_least(1, batch_size=batch_size)
    if context < 2 or tokens < context:
        raise LyapunovPruneError(f"{tokens} tokens in windows of {context} are no text; give 2 or more, and a window")
    begin = _first_token(model)
    windows, steps = tokens // context, context - 1
    reading = read(model, torch.full((1, context), begin))  # its context and vocabulary are checked
    known = identify(model)
    about: dict[str, Any] = {"weights": known.weights, "settings": known.settings}
    about |= {"dtype": str(model.dtype), "context": context, "seed": seed}
    with Store(folder, "self-generated text", about, resume=resume) as store:
        missing = [window for window in range(windows) if str(window) not in store]
        for first in track(range(0, len(missing), batch_size), "writing text to learn from"):
            some = missing[first : first + batch_size]
            written = sample(reading, torch.full((len(some), 1), begin), draws_of(seed, some, steps))
            for window, row in zip(some, written.tolist(), strict=True):
                store.add(str(window), row)
        rows = [[begin, *store[str(window)]] for window in range(windows)]
    return TokenBatch(torch.tensor(rows), text=f"written by {known.name}", split="all", bos=True)


def _first_token(model: PreTrainedModel) -> int:
    """The BOS token of the model, or what ends a text, behind which another begins."""
    for name in ("bos_token_id", "eos_token_id"):
        for settings in (model.generation_config, model.config.get_text_config()):
            token = getattr(settings, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
    raise LyapunovPruneError(
        f"{identify(model).name} names no token to begin a text with (bos_token_id); give a text to learn from"
    )
