"""Criterion `kl`: the layer goes first whose skipping moves the prediction least."""

from __future__ import annotations

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.predictions.divergence import SkipDivergence
from lyapunov_prune.ranking.ranking import LayerRanking


def rank_by_divergence(measured: SkipDivergence) -> LayerRanking:
    """Rank layers by `variance`, smallest removed first (criterion `kl`).

    Raises LyapunovPruneError when a layer has no finite score.
    """
    if not np.isfinite(measured.variance).all():
        raise LyapunovPruneError(
            f"the score of layer {int(np.argmin(np.isfinite(measured.variance)))} is not finite; "
            "measure again in float32"
        )
    return LayerRanking(
        criterion="kl",
        alpha=None,
        scores=measured.variance,
        model=measured.measured_on.model,
        measured_on=(measured.measured_on,),
    )
