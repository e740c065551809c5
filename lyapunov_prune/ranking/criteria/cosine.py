"""Criterion `cosine`: first remove the layer whose removal turns the probabilities least."""

from __future__ import annotations

from lyapunov_prune.ranking.criteria.kl import KL
from lyapunov_prune.ranking.criterion import EVERYWHERE


class Cosine(KL):
    """`mean_t Var_{r_t}(Δz_t) / (2T²)`, `r_i = p_i² / ‖p‖²`: `1 − cos(p, q)` to second order.

    The predictions are those at `temperature` (`predictions.divergence`). Raises LyapunovPruneError for a temperature
    that is not above 0.
    """

    help = "how much the probabilities rotate when the layer is skipped"
    reference = "Demystifying When Pruning Works via Representation Hierarchies, Theorem 2"
    needs = ("variance_r",)
    parts = EVERYWHERE
