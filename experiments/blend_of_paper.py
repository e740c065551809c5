"""The blend of ρ and Block Influence as the paper has it; the package's is on a robust scale (2_criteria/scales)."""

from dataclasses import replace

import numpy as np

import lyapunov_prune as lp
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.influence import InfluenceProfile
from lyapunov_prune.ranking.ranking import LayerRanking


def minmax(x: np.ndarray) -> np.ndarray:
    return (x - x.min()) / np.ptp(x)


def blend_of_paper(profile: ContractionProfile, influence: InfluenceProfile, alpha: float = 0.5) -> LayerRanking:
    """By `α · minmax(|ρ − 1|) + (1 − α) · minmax(bi)`, each from 0 to 1 over all layers (§6.5)."""
    scores = alpha * minmax(np.abs(profile.rho - 1)) + (1 - alpha) * minmax(influence.influence)
    ours = lp.rank_layers(profile, influence, criterion="blend", alpha=alpha)
    return replace(ours, scores=scores, picked=None)
