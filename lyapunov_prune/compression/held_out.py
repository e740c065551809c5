"""The loss of a compressed model on calibration windows that were not used to compress it."""

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
    """The first half of the windows, to compress by, and the second half, to judge by.

    Raises LyapunovPruneError for a single window.
    """
    if len(batch.ids) < 2:
        raise LyapunovPruneError("a search scores on windows that it does not calibrate by; give two or more")
    middle = (len(batch.ids) + 1) // 2
    return replace(batch, ids=batch.ids[:middle]), replace(batch, ids=batch.ids[middle:])


@dataclass(frozen=True, eq=False)
class OnHalves:
    """A measurement on `reading` that changes the model by one half of its windows and judges it by the other.

    Raises LyapunovPruneError for a single window.
    """

    reading: Reading

    def __post_init__(self) -> None:
        halves(self.reading.batch)

    @property
    def measured_on(self) -> MeasuredOn:
        return self.reading.measured_on()


@dataclass(frozen=True, eq=False)
class HeldOutLoss(OnHalves):
    """The score that a search minimises (`allocation.schedule.Score`).

    `compress` uses the first half of the windows of `reading`, and the result is scored on the second: no window does
    both, and the evaluation text is not used. A call costs one compression, one forward of half the windows, and memory
    for a copy of the model. Raises LyapunovPruneError for a single window.
    """

    compress: Callable[[PreTrainedModel, TokenBatch, Allocation], PreTrainedModel]
    batch_size: int

    def __call__(self, allocation: Allocation) -> float:
        seen, unseen = halves(self.reading.batch)
        try:
            small = self.compress(self.reading.model, seen, allocation)
            return perplexity(small, unseen, batch_size=self.batch_size).nll
        except (NonFiniteError, RankError):  # a broken model, or no rank is small enough: search on
            return float("inf")
