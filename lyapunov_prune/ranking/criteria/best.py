"""Criterion `best`: check by the loss the sets that cheap criteria propose, and search around the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lyapunov_prune.ranking.criterion import RankingRequest, Together

if TYPE_CHECKING:
    from lyapunov_prune.ranking.tried import BestRemoval


class Best(Together):
    """A search among sets of layers that may spend `search` forwards (`best_removal`).

    With `mend` it also compares the sets with their gaps mended, on the text `judge` too.
    """

    search: float | None = None
    mend: bool = False
    judge: Any = None  # a TokenBatch; None: the model generates one

    help = "sets that the others propose and swaps of them, compared by loss"
    reference = "measured, see experiments/2_criteria"
    chooses = "searches among sets"

    def chosen(self, asked: RankingRequest) -> BestRemoval:
        from lyapunov_prune.ranking.best import best_removal

        assert asked.remove is not None  # `chooses`
        return best_removal(
            asked.reading.decoder,
            asked.reading,
            asked.remove,
            search=self.search,
            protect=asked.protect,
            mend=self.mend,
            judge=self.judge,
            folder=asked.jobs,
            batch_size=asked.batch_size,
        )
