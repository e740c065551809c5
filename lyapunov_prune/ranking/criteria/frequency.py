"""Criterion `frequency`: first remove the expert that gets the fewest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criterion import OfExperts

if TYPE_CHECKING:
    from lyapunov_prune.profiles.expert_use import ExpertUse


class Frequency(OfExperts):
    """The share of a layer's routed tokens that the expert gets."""

    help = "for experts: share of the tokens routed to the expert"
    reference = "control"

    def score(self, use: ExpertUse) -> np.ndarray:
        return use.share(use.tokens)
