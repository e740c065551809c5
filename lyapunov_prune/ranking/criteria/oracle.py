"""Criterion `oracle`: remove one layer after another, each time the one whose removal costs least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.ranking.criterion import RankingRequest, Together

if TYPE_CHECKING:
    from lyapunov_prune.ranking.oracle import GreedyRemoval


class Oracle(Together):
    """Greedy search by the loss on the text itself (`greedy_removal`), as SLEB does it."""

    help = "greedy: at each step the layer whose removal raises the loss least"
    reference = "SLEB, ICML 2024, arXiv:2402.09025"
    chooses = "searches step by step"

    def chosen(self, asked: RankingRequest) -> GreedyRemoval:
        from lyapunov_prune.ranking.oracle import greedy_removal

        assert asked.remove is not None  # `chooses`
        return greedy_removal(
            asked.reading.decoder,
            asked.reading,
            asked.remove,
            folder=asked.jobs,
            batch_size=asked.batch_size,
            protect=asked.protect,
        )
