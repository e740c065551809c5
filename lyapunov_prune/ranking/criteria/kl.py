"""Criterion `kl`: first remove the layer whose removal moves the prediction least."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from lyapunov_prune.arguments import Positive
from lyapunov_prune.ranking.criterion import EVERYWHERE, RankingRequest, Scored

if TYPE_CHECKING:
    from lyapunov_prune.forward.anatomy import Kind
    from lyapunov_prune.ranking.ranking import Ranking


class KL(Scored):
    """For layers `Var_p(Δz)`, which is twice the KL to second order; for experts the measured KL.

    The predictions are those at `temperature` (`predictions.divergence`). Raises LyapunovPruneError for a temperature
    that is not above 0.
    """

    temperature: Positive = 1.0

    help = "how much the prediction changes when the layer is skipped"
    reference = "Demystifying When Pruning Works via Representation Hierarchies, Theorem 3"
    needs = ("variance",)
    parts: ClassVar[tuple[str, ...]] = (*EVERYWHERE, "experts")
    streamed = ("layers",)

    def rank(self, asked: RankingRequest) -> Ranking:
        if asked.what == "experts":
            from lyapunov_prune.ranking.experts import masked_divergence, rank_experts

            kl = masked_divergence(asked.reading, self.temperature, asked.batch_size)
            experts = rank_experts(asked.reading, self.name, lambda use: kl, asked.batch_size)
            asked.keep("expert-use", experts.use)
            return experts
        from lyapunov_prune.predictions.divergence import SkipDivergence, skip_divergence, sublayer_divergence
        from lyapunov_prune.ranking.measured import rank_by_divergence

        model, reading = asked.reading.decoder, asked.reading
        how: dict[str, Any] = {"temperature": self.temperature, "batch_size": asked.batch_size}
        measured: SkipDivergence
        if asked.what == "layers":
            name, measured = "divergence", skip_divergence(model, reading, **how, folder=asked.folder)
        else:
            name, measured = "sublayer-divergence", sublayer_divergence(model, reading, cast("Kind", asked.what), **how)
        ranking = rank_by_divergence(measured, criterion=self.name, protect=asked.protect)
        asked.keep(name, measured)
        return ranking
