"""Criterion `kl`: the layer goes first whose leaving out moves the prediction least."""

from __future__ import annotations

from collections.abc import Sequence

from lyapunov_prune.arguments import checked
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence
from lyapunov_prune.ranking.ranking import LayerRanking, scored


@checked
def rank_by_divergence(measured: SkipDivergence, *, protect: Sequence[int] = ()) -> LayerRanking:
    """Rank layers, or their attention or MLP, by `variance`, smallest removed first (criterion `kl`).

    Raises LyapunovPruneError when a layer has no finite score.
    """
    part = measured.what if isinstance(measured, SublayerDivergence) else "layers"
    on = measured.measured_on
    return scored("kl", {"variance": measured.variance}, on.model, (on,), what=part, protect=protect)
