"""Criterion `bi`: first remove the layer that turns the hidden state least."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lyapunov_prune.ranking.criterion import EVERYWHERE, RankingRequest, Scored

if TYPE_CHECKING:
    from lyapunov_prune.forward.anatomy import Kind
    from lyapunov_prune.ranking.ranking import LayerRanking


class BlockInfluence(Scored):
    """Block Influence, `1 − E_t cos(h_l,t, h_{l+1,t})`; for a sublayer, between the state before and after it."""

    help = "Block Influence: how much the layer rotates the hidden state"
    reference = "ShortGPT, arXiv:2403.03853; of sublayers LLM-Drop, arXiv:2406.15786"
    needs = ("bi",)
    parts = EVERYWHERE
    streamed = EVERYWHERE
    profiled = True

    def rank(self, asked: RankingRequest) -> LayerRanking:
        from lyapunov_prune.profiles.influence import block_influence, sublayer_influence
        from lyapunov_prune.ranking.measured import rank_sublayers

        model, reading = asked.reading.decoder, asked.reading
        if asked.what == "layers":
            whole = block_influence(model, reading, batch_size=asked.batch_size)
            ranking = self.of_profiles(None, whole, asked.protect)
            asked.keep("influence", whole)
        else:
            parts = sublayer_influence(model, reading, batch_size=asked.batch_size)
            ranking = rank_sublayers(parts, cast("Kind", asked.what), protect=asked.protect)
            asked.keep("sublayers", parts)
        return ranking
