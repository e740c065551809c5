"""How often intervals hold: probabilities that add up to one, and shares on losses of which the truth is known."""

from __future__ import annotations

import importlib

import numpy as np

COVERAGE = importlib.import_module("experiments.6_recovery.coverage.run")
RNG = np.random.default_rng(0)


def test_the_probabilities_of_all_bytes_after_a_context_add_up_to_one() -> None:
    learnt = RNG.integers(97, 101, 500)
    every = np.stack([np.array([97, 98, byte]) for byte in range(256)])
    np.testing.assert_allclose(np.sum([COVERAGE.grams(learnt, window) for window in every], 0)[:, 0], 1)


def test_windows_that_are_alike_in_runs_are_held_by_blocks_and_not_by_single_windows() -> None:
    alone, runs = RNG.normal(size=400), np.repeat(RNG.normal(size=50), 8)
    assert min(COVERAGE.share_held(alone, 64, 32), COVERAGE.single(alone, 64, 32)) > 0.85
    assert COVERAGE.single(runs, 64, 32) < COVERAGE.share_held(runs, 64, 32) - 0.2
