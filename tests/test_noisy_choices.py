"""The choices of maps that are fitted to noisy scores."""

from __future__ import annotations

import numpy as np
from joint.test_decision import LAYERS, fitted

from experiments.noisy_maps import noisy_choices
from lyapunov_prune.joint import decide, fit_map


def test_noisy_refits_are_those_of_a_loop() -> None:
    """One fit a time, from nothing, degree and all."""
    m = fitted(0.5)
    decision = decide(m, LAYERS, remove=8, selection_error=0.0)
    counts = np.zeros(9)
    for moved in np.random.default_rng(3).normal(0.0, 4.0, (40, len(m.scores))) + m.scores:
        counts[fit_map(m.removed.tolist(), moved.tolist()).predict(decision.pairs / LAYERS).argmax()] += 1
    np.testing.assert_array_equal(noisy_choices(m, decision, 4.0, refits=40, seed=3), counts / 40)
    assert (counts > 0).sum() > 1
    still = noisy_choices(m, decision, 0.0, refits=3)
    assert still[decision.best] == 1
