"""Sets that cheap criteria propose, against brute force and physical removals; what is promising among swaps."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import LAYERS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.forward.reading import read
from lyapunov_prune.ranking.candidates import SOURCES, Layers, least, nearest_runs, swaps, turned

SIZE = 7
FREE = tuple(range(LAYERS))
DISTANCES = arrays(np.float64, (SIZE + 1, SIZE + 1), elements=st.floats(0.001, 10))


def runs_of(layers: Layers) -> int:
    return sum(layer - 1 not in layers for layer in layers)


@settings(max_examples=100)
@given(DISTANCES, st.integers(1, SIZE - 1), st.integers(1, 3), st.sets(st.integers(0, SIZE - 1), min_size=1))
def test_the_nearest_runs_are_those_of_brute_force(
    distance: np.ndarray, remove: int, runs: int, allowed: set[int]
) -> None:
    free = tuple(sorted(allowed))
    found = nearest_runs(distance, remove, free, runs)
    possible = [s for s in combinations(free, remove) if runs_of(s) <= runs]
    assert (found is None) == (not possible)
    if found is not None:
        assert found in possible
        assert turned(distance, found) == pytest.approx(min(turned(distance, s) for s in possible))


def test_one_run_is_that_of_the_angular_criterion(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    measured = lp.ranking.angular_distance(llama, ids)
    assert nearest_runs(measured.distance, 3, FREE, 1) == measured.plan(3).remove


def test_the_least_scores_of_layers_that_may_go() -> None:
    assert least(np.array([2.0, 1.0, np.nan, 1.0]), 2, (1, 4, 5, 9)) == (4, 9)
    assert least(np.array([2.0, 1.0, np.nan, 1.0]), 4, (1, 4, 5, 9)) == (1, 4, 5, 9)


@pytest.mark.parametrize("free", [FREE, (1, 2, 4, 5)])
def test_the_sets_of_measurements_are_those_of_the_rankings(
    free: Layers, llama: PreTrainedModel, ids: torch.Tensor
) -> None:
    protect = [layer for layer in FREE if layer not in free]
    profile, influence = lp.measure_contraction(llama, ids, seeds=(0, 1)), lp.block_influence(llama, ids)
    wanted = {"kl": lp.rank(llama, ids, criterion="kl", protect=protect).plan(2).remove}
    for pooling in ("energy", "token"):
        for criterion in ("rho", "blend"):
            ranking = lp.rank_layers(profile.pooled(pooling), influence, criterion=criterion, protect=protect)
            wanted[f"{criterion} ({pooling})"] = ranking.plan(2).remove
    gone: list[int] = []
    for _ in range(2):  # measured on models that were really cut
        small = lp.remove_layers(llama, gone) if gone else llama
        left = [layer for layer in FREE if layer not in gone]
        scores = dict(zip(left, lp.block_influence(small, ids).influence, strict=True))
        gone.append(min(set(left) & set(free), key=lambda layer: scores[layer]))
    wanted["bi anew"] = tuple(sorted(gone))
    reading = read(llama, ids)
    found = {by: s for source in SOURCES.values() for by, s in source.sets(reading, 2, free, 1).items()}
    assert found == wanted


# Swaps.


@settings(max_examples=30)
@given(DISTANCES, st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE - 1))
def test_every_swap_comes_once_and_none_that_was_tried(distance: np.ndarray, chosen: set[int]) -> None:
    current, free = tuple(sorted(chosen)), tuple(range(SIZE))
    every = [s for s in combinations(free, len(current)) if len(set(s) - chosen) == 1]
    tried = {current: 1.0, every[0]: float("inf"), every[-1]: -0.1}
    found = list(swaps(current, free, tried, distance))
    assert sorted(found) == sorted(set(every) - set(tried))


def test_layers_that_cost_much_where_they_were_tried_come_last() -> None:
    distance = 1 - np.eye(SIZE + 1)
    tried = {(0, 2): 0.1, (0, 4): 5.0, (4, 6): 5.0, (1, 6): 0.1}
    found = list(swaps((0, 2), tuple(range(SIZE)), tried, distance))
    assert found[-1] == (2, 4)
    assert {*found[0]} & {1, 6}
