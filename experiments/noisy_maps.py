"""What a map of pairs chooses when its scores are moved by noise."""

import numpy as np

from lyapunov_prune.joint import JointDecision, JointMap
from lyapunov_prune.joint.map import coefficients, design, first_of_least, left_two_out


def noisy_choices(
    fitted: JointMap, decision: JointDecision, deviation: float, refits: int = 500, seed: int = 0
) -> np.ndarray:
    """(m,) share of `refits` that choose each pair of the decision, with fresh noise `N(0, deviation²)` on every score.

    Each refit also chooses its degree. A selection frequency, not a probability of being right.
    """
    moved = np.random.default_rng(seed).normal(0.0, deviation, (refits, len(fitted.scores))) + fitted.scores
    shares = decision.pairs / decision.layers
    errors = np.stack([left_two_out(fitted.removed, moved, degree) for degree in fitted.errors])
    predicted = [coefficients(fitted.removed, moved, degree) @ design(shares, degree).T for degree in fitted.errors]
    best = np.stack(predicted)[first_of_least(errors, moved), np.arange(refits)].argmax(-1)
    return np.bincount(best, minlength=len(decision.pairs)) / refits
