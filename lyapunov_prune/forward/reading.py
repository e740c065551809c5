"""A reading of a model: what every measurement needs to find out before it begins, found out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch, Tokens, checked_batch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.anatomy import Anatomy, find_anatomy
from lyapunov_prune.forward.hooks import final_state, require_finite
from lyapunov_prune.forward.prefix import Prefix
from lyapunov_prune.forward.scoring import Scorer, is_large, scored_in
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.plain import require_readable
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.results.result import MeasuredOn

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Reading:
    """A decoder and a checked batch; the rest is computed on first use and cached.

    A measurement passes its reading, in place of a batch, to those it calls. It describes the model as it was: inside a
    block that changes weights or skips layers, make a new reading of `batch`. `prefix` and `scorer` run the model on
    first use, so use them before setting hooks that should not see that.
    """

    decoder: Decoder
    batch: TokenBatch

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model

    @property
    def structure(self) -> Structure:
        return self.decoder.structure

    def windows(self, batch_size: int) -> list[torch.Tensor]:
        """The token ids, `batch_size` windows at a time, on the model's device; LyapunovPruneError below 1.

        A streamed model takes all windows at once: its files are read once per forward, and it splits the batch itself.
        """
        if self.decoder.stream is not None:
            if batch_size != 1:
                raise LyapunovPruneError("a streamed model takes all windows in one forward; leave out the batch size")
            batch_size = len(self.batch)
        return [ids.to(self.model.device) for ids in self.batch.windows(batch_size)]

    def logits(self, ids: torch.Tensor) -> list[Iterable[torch.Tensor]]:
        """The model's own logits of every window of `ids` but those of its last token, a block of positions at a time.

        For large windows and streamed models they are computed from the final states when a block is asked for.
        """
        streamed = self.decoder.stream is not None
        if not streamed and not (is_large(self.model, ids) and self.scorer.enters):
            return [scored_in(rows) for rows in self.model(ids, use_cache=False).logits]
        if not self.scorer.enters:  # happens if the first tokens are not finite
            require_finite(self.structure, ids[:1], f"window 0 of {self.batch.text}")
        return [self.scorer.blocks(rows[:-1]) for rows in final_state(self.structure, ids)]

    def measured_on(self, seed: int | None = None) -> MeasuredOn:
        return replace(self._measured_on, seed=seed)

    def once(self, key: Hashable, measure: Callable[[], T]) -> T:
        """The result of `measure`, which runs at the first call with `key` alone."""
        if key not in self._found:
            self._found[key] = measure()
        found: T = self._found[key]
        return found

    @cached_property
    def _found(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _measured_on(self) -> MeasuredOn:
        return self.batch.measured_on(self.decoder)

    @cached_property
    @torch.no_grad()
    def prefix(self) -> Prefix:
        return Prefix(self.structure, self.windows(1)[0])

    @cached_property
    @torch.no_grad()
    def scorer(self) -> Scorer:
        return Scorer(self.decoder, self.windows(1)[0])

    @cached_property
    def anatomy(self) -> dict[int, Anatomy]:
        """The attention and the MLP of every layer. Raises LyapunovPruneError unless the weights are plain matrices."""
        require_readable(self.decoder)
        return find_anatomy(self.decoder, range(self.structure.num_layers))


# What a measurement accepts as its batch.
Readable = Tokens | Reading


def read(decoder: Decoder, batch: Readable, steps: int = 0) -> Reading:
    """The reading of `batch`: `batch` itself if it is a reading of this model, or else one of its tokens.

    `steps` more tokens must fit the context behind each window. Raises LyapunovPruneError as `checked_batch` does.
    """
    if not isinstance(batch, Reading):
        return Reading(decoder, checked_batch(decoder.structure, batch, steps))
    if batch.model is not decoder.model or steps:
        checked_batch(decoder.structure, batch.batch, steps)
    return batch if batch.model is decoder.model else Reading(decoder, batch.batch)
