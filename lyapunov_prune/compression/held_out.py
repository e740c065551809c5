"""Calibration windows that a choice is judged on and that it does not see, and what a model loses there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.compression.method import RankError
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.results.result import MeasuredOn


def halves(batch: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """The first half of the windows, to choose by, and the other half, to judge by.

    Raises LyapunovPruneError for one window.
    """
    if len(batch.ids) < 2:
        raise LyapunovPruneError("a search scores on windows that it does not calibrate by; give two or more")
    middle = (len(batch.ids) + 1) // 2
    return replace(batch, ids=batch.ids[:middle]), replace(batch, ids=batch.ids[middle:])


@dataclass(frozen=True, eq=False)
class HeldOutLoss:
    """The score that a search goes by (`allocation.schedule.Score`).

    The first half of the windows of `reading` is what `compress` goes by, the other half what the result is scored on:
    no window does both, and the evaluation text is neither. A call costs one compression and one forward of half the
    windows, and a copy of the model. Raises LyapunovPruneError for one window.
    """

    reading: Reading
    compress: Callable[[PreTrainedModel, TokenBatch, Allocation], PreTrainedModel]
    batch_size: int

    def __post_init__(self) -> None:
        halves(self.reading.batch)

    @property
    def measured_on(self) -> MeasuredOn:
        return self.reading.measured_on()

    def __call__(self, allocation: Allocation) -> float:
        seen, unseen = halves(self.reading.batch)
        try:
            small = self.compress(self.reading.model, seen, allocation)
            return perplexity(small, unseen, batch_size=self.batch_size).nll
        except (NonFiniteError, RankError):  # a wreck, or a layer that no rank is small enough for, ends no search
            return float("inf")
