"""Windows of token ids: the input of every measurement, checked, and compared with what others saw."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder, Model, model_of
from lyapunov_prune.models.structure import Structure, identify
from lyapunov_prune.results.overlap import fingerprint, run_hashes, shared_tokens
from lyapunov_prune.results.result import MeasuredOn, versions

Split = Literal["calibration", "evaluation", "all"]
# Two texts that share a run of this many tokens leak.
LEAK_TOKENS = 64
# Items are shorter and are recognised by runs of this many tokens.
ITEM_TOKENS = 12


@dataclass(frozen=True, repr=False)
class TokenBatch:
    """Token ids, windows × context (int64), and where they came from."""

    ids: torch.Tensor
    text: str
    split: str
    bos: bool | None

    def __repr__(self) -> str:
        return f"{' × '.join(map(str, self.ids.shape))} tokens of {self.text} ({self.split})"

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, index: int) -> torch.Tensor:
        """One window, (context,) ids."""
        return self.ids[index]

    def take(self, indices: Sequence[int]) -> TokenBatch:
        """The windows at these indices, in this order."""
        return replace(self, ids=self.ids[torch.tensor(indices, dtype=torch.int64)])

    def windows(self, batch_size: int) -> list[torch.Tensor]:
        """The ids, `batch_size` windows at a time."""
        return list(self.ids.split(batch_size))

    @property
    def context(self) -> int:
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    @property
    def text_hash(self) -> str:
        """SHA-256 of the ids and their shape."""
        ids = self.ids.to("cpu", torch.int64).contiguous()
        return hashlib.sha256(str(tuple(ids.shape)).encode() + ids.numpy().tobytes()).hexdigest()

    @property
    def stream(self) -> np.ndarray:
        """All tokens in a row, (n,) int64, without the BOS token of each window."""
        ids = self.ids.to("cpu", torch.int64)
        # If `bos` is unknown, a token that starts every window is taken for BOS.
        begins = len(ids) > 1 and bool((ids[:, 0] == ids[0, 0]).all()) if self.bos is None else self.bos
        return ids[:, int(begins) :].flatten().numpy()

    def shared_with(self, seen: MeasuredOn) -> int:
        """Approximate number of these tokens that `seen` was measured on, counted in runs of at least 64."""
        if seen.text_hash == self.text_hash:
            return self.tokens
        return shared_tokens(self.stream, seen.fingerprint) if seen.fingerprint and not seen.images else 0

    def measured_on(self, model: Model, seed: int | None = None) -> MeasuredOn:
        """The record of a measurement of a model."""
        return MeasuredOn(
            **about(model),
            text=self.text,
            split=self.split,
            text_hash=self.text_hash,
            tokens=self.tokens,
            context=self.context,
            bos=self.bos,
            seed=seed,
            fingerprint=fingerprint(self.stream, LEAK_TOKENS),
            short=fingerprint(self.stream, ITEM_TOKENS),
        )


def about(model: Model) -> dict[str, Any]:
    """The fields of MeasuredOn that describe the model and the software."""
    plain = model_of(model)
    return {
        "model": model.identity if isinstance(model, Decoder) else identify(plain),
        "dtype": str(plain.dtype).removeprefix("torch."),
        "device": plain.device.type,
        "versions": versions(),
    }


def rows_measured_on(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    text: str,
    *,
    bos: bool,
    seed: int | None = None,
    packages: Sequence[str] = (),
) -> MeasuredOn:
    """The record of a measurement of `model` on rows of ids of different lengths, scored by `packages`."""
    ids = torch.tensor([[token for row in rows for token in row]], dtype=torch.int64)
    on = TokenBatch(ids, text=text, split="all", bos=bos).measured_on(model, seed)
    told = {**on.versions, **{name: version(name) for name in packages}}
    return replace(on, context=max(map(len, rows)), versions=told)


# What functions accept as windows: a tensor of ids, a tokenizer's output, or a loader of batches.
Tokens = TokenBatch | torch.Tensor | Mapping[str, Any] | DataLoader


def checked_batch(structure: Structure, batch: Tokens, steps: int = 0) -> TokenBatch:
    """The windows as a batch, checked against vocabulary and context, in which `steps` more tokens must have room.

    Raises LyapunovPruneError if they do not fit.
    """
    if not isinstance(batch, TokenBatch):
        batch = TokenBatch(_ids_of(batch), text="token ids", split="all", bos=None)
    ids: Any = batch.ids
    fits = isinstance(ids, torch.Tensor) and ids.ndim == 2 and len(ids) > 0 and ids.shape[1] > 1
    if not (fits and ids.dtype in (torch.int64, torch.int32)):
        given = "windows of different lengths or padding" if ids is None else f"a {type(ids).__name__}"
        if isinstance(ids, torch.Tensor):
            given = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise LyapunovPruneError(
            f"token ids are {given}; give an integer tensor (windows, tokens), alone or as input_ids, of two tokens or "
            "more and without padding, as load_text does"
        )
    require_context(structure, batch.context, steps)
    require_known(int(batch.ids.min()), int(batch.ids.max()), structure.config.vocab_size)
    return batch


def require_known(low: int, high: int, vocabulary: int) -> None:
    """Raise LyapunovPruneError unless the ids from `low` to `high` are of a vocabulary of this size."""
    if low < 0 or high >= vocabulary:
        raise LyapunovPruneError(
            f"token id {high if high >= vocabulary else low} is outside the model's vocabulary of {vocabulary}; "
            "use the model's own tokenizer"
        )


def _ids_of(batch: Any) -> Any:
    """The ids of a tokenizer's `input_ids`, or of all batches of a loader, as one matrix; `batch` if it holds none.

    None for windows of different lengths, padded or not.
    """
    if isinstance(batch, DataLoader):
        parts = [_ids_of(each[0] if isinstance(each, list | tuple) and each else each) for each in batch]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            return batch
        if len({part.shape[-1] for part in parts}) == 1:
            return torch.cat(parts)
    elif isinstance(batch, Mapping) and "input_ids" in batch:
        with suppress(TypeError, ValueError):  # rows that make no matrix
            ids, *masks = (torch.as_tensor(batch[n]) for n in ("input_ids", "attention_mask") if n in batch)
            if all(bool((mask != 0).all()) for mask in masks):
                return ids[None] if ids.ndim == 1 else ids
    else:
        return batch
    return None


def filled(rows: Sequence[Sequence[int]], least: int = 1) -> torch.Tensor:
    """The `rows` of ids as one int64 matrix of `least` columns or more, short ones filled with their last id.

    This needs no padding mask: in a causal model no position attends to a later one.
    """
    width = max(least, *map(len, rows))
    return torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows], dtype=torch.int64)


def whole_windows(tokens: int, context: int) -> int:
    """How many windows of `context` tokens are cut from so many. Raises LyapunovPruneError if there are none."""
    if tokens < context:
        raise LyapunovPruneError(f"{tokens} tokens do not fill one window of {context}; raise --tokens")
    return tokens // context


def require_context(structure: Structure, context: int, steps: int = 0) -> None:
    """Raise LyapunovPruneError if `context` tokens, and `steps` more to read, exceed the model's positions."""
    if structure.max_context and context + steps > structure.max_context:
        new, lower = (f" and {steps} more tokens are", "--new-tokens or --context") if steps else (" is", "--context")
        most = structure.max_context
        raise LyapunovPruneError(f"context {context}{new} longer than the model's {most}; lower {lower}")


def require_disjoint(calibration: TokenBatch, evaluation: TokenBatch) -> None:
    """Raise LyapunovPruneError if both batches contain the same run of 64 tokens, even across windows.

    For windows shorter than 64 tokens, which need not be adjacent, a shared run as long as the shorter window suffices.
    """
    batches = calibration, evaluation
    for rows in ([batch.ids.cpu().numpy() for batch in batches], [batch.stream[None] for batch in batches]):
        size = min(LEAK_TOKENS, *(row.shape[1] for row in rows))
        first, second = (run_hashes(row, size) for row in rows)
        if np.isin(first, second).any():
            raise LyapunovPruneError(
                f"{calibration.text} ({calibration.split}) and {evaluation.text} ({evaluation.split}) share {size} "
                "tokens in a row; give another text or split for one of them"
            )
