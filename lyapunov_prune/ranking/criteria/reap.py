"""Criterion `reap`: first remove the expert that adds least to the tokens that choose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.lazy import np
from lyapunov_prune.ranking.criterion import OfExperts

if TYPE_CHECKING:
    from lyapunov_prune.profiles.expert_use import ExpertUse


class Reap(OfExperts):
    """The mean, over the tokens routed to the expert, of router weight × ‖output of the expert‖₂."""

    help = "for experts: router weight times output norm, mean over its tokens"
    reference = "REAP, arXiv:2510.13999"

    def score(self, use: ExpertUse) -> np.ndarray:
        return use.saliency
