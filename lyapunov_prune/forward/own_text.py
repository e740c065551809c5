"""Text that a model writes itself, for calibration without a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count, Positive, Range, Seed
from lyapunov_prune.data.batch import Split, TokenBatch, whole_windows
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.dealing import shared_out
from lyapunov_prune.forward.decoding import continued, drawn, draws_of
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.models.launched import from_each
from lyapunov_prune.models.structure import model_name
from lyapunov_prune.results.store import Store

# Different seeds, so that calibration and evaluation texts differ.
_SEEDS = {"calibration": 0, "all": 0, "evaluation": 1}
AT_ONCE = 32  # windows: a step reads all weights once, however many windows it is for


def written_by(
    model: PreTrainedModel, split: Split, tokens: int, context: int, *, folder: Path | None = None
) -> TokenBatch:
    """The text `self` of a model: `self_generated` with the seed of a split."""
    text = self_generated(model, tokens=tokens, context=context, seed=_SEEDS[split], folder=folder)
    return replace(text, split=split)


@runs_model
def self_generated(
    model: InMemory,
    *,
    tokens: int = 25600,
    context: Annotated[int, Range(2)] = 256,
    seed: Seed = 0,
    temperature: Positive = 1.0,
    batch_size: Count = AT_ONCE,
    folder: str | Path | None = None,
) -> TokenBatch:
    """Windows written by `model`: its BOS token, then tokens drawn from `softmax(logits / temperature)`.

    Returns `tokens // context` windows, (windows × context) int64; after the end of a text another begins. The random
    numbers depend only on `seed` and the window's number, so `batch_size` affects rounding only. The batch's `text`
    names the model, its weights, the temperature and the seed. Finished windows are stored in `folder` and
    not written again.

    Raises LyapunovPruneError for a model without a BOS or end-of-text token to begin with, a context below two tokens
    or longer than the model's, fewer tokens than one window, a temperature not above 0, and for logits that are not
    finite, naming the step.
    """
    windows = whole_windows(tokens, context)
    begin = _first_token(model.model)
    steps = context - 1
    reading = read(model, torch.full((1, context), begin))  # checks context and vocabulary
    known = model.identity
    about: dict[str, Any] = {"model": known.key, "dtype": str(model.model.dtype)}
    about |= {"context": context, "seed": seed, "temperature": temperature}
    with Store(folder, "self-generated text", about) as store:
        for others in from_each(model.model, store.items()):
            store.learn(others)
        missing = [window for window in range(windows) if str(window) not in store]
        batch_size = min(batch_size, max(1, -(-len(missing) // len(from_each(model.model, None)))))

        def write(first: int) -> dict[str, list[int]]:
            some = missing[first : first + batch_size]
            prompts, draws = torch.full((len(some), 1), begin), draws_of(seed, some, steps)
            written = continued(reading, prompts, steps, drawn(draws, temperature)).tolist()
            rows = {str(window): row for window, row in zip(some, written, strict=True)}
            for window, row in rows.items():
                store.add(window, row)
            return rows

        for others in shared_out(reading, range(0, len(missing), batch_size), write, "writing text"):
            store.learn(others)
        rows = [[begin, *store[str(window)]] for window in range(windows)]
    weights = next(iter(known.weights.values()))[:12]
    source = f"written by {known.name} (weights {weights}, temperature {temperature:g}, seed {seed})"
    return TokenBatch(torch.tensor(rows), text=source, split="all", bos=True)


def _first_token(model: PreTrainedModel) -> int:
    """The model's BOS token, or else the one that ends a text, after which another begins."""
    for name in ("bos_token_id", "eos_token_id"):
        for settings in (model.generation_config, model.config.get_text_config()):
            token = getattr(settings, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
    raise LyapunovPruneError(
        f"{model_name(model)} names no token to begin a text with (bos_token_id), so it writes none; give --text, and "
        "--judge where a second text is needed"
    )
