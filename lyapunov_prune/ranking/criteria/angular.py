"""Criterion `angular`: remove the run of layers whose ends are nearest in angle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.ranking.criterion import RankingRequest, Together

if TYPE_CHECKING:
    from lyapunov_prune.ranking.angular import AngularDistance


class Angular(Together):
    """The run of n layers with the least `1 − E_t cos(h_l,t, h_{l+n,t})` (`angular_distance`)."""

    help = "the consecutive layers that rotate the hidden state least"
    reference = "arXiv:2403.17887"
    streamed = ("layers",)
    chooses = "removes a run of layers"

    def chosen(self, asked: RankingRequest) -> AngularDistance:
        from lyapunov_prune.ranking.angular import angular_distance

        return angular_distance(
            asked.reading.decoder,
            asked.reading,
            batch_size=asked.batch_size,
            protect=asked.protect,
            folder=asked.folder,
        )
