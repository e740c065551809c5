"""Sets that cheap criteria propose, against brute force and physical removals; what is promising among swaps."""

from __future__ import annotations

from functools import partial
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
from lyapunov_prune.mending.mend import TRIALS
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.ranking.candidates import (
    SOURCES,
    Layers,
    SearchCost,
    _expected,
    by_direction,
    end_turns,
    least,
    nearest_runs,
    swaps,
    turn_at_the_end,
    turn_on_the_way,
)

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
        assert turn_on_the_way(distance, found) == pytest.approx(min(turn_on_the_way(distance, s) for s in possible))


def test_runs_are_proposed_one_two_and_three_at_a_time() -> None:
    distance = np.full((SIZE + 1, SIZE + 1), 9.0)
    for begin, end, turn in ((1, 4, 1.0), (0, 2, 0.3), (3, 4, 0.4), (0, 1, 0.1), (2, 3, 0.1), (6, 7, 0.1)):
        distance[begin, end] = turn
    found = by_direction(distance, 3, tuple(range(SIZE)))
    assert (found["angular"], found["2 runs"], found["3 runs"]) == ((1, 2, 3), (0, 1, 6), (0, 2, 6))
    assert found["bi"] == (0, 2, 6)


def test_one_run_is_that_of_the_angular_criterion(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    measured = lp.ranking.angular_distance(llama, ids)
    assert nearest_runs(measured.distance, 3, FREE, 1) == measured.plan(3).remove


def test_the_least_scores_of_layers_that_may_go() -> None:
    assert least(np.array([2.0, 1.0, np.nan, 1.0]), 2, (1, 4, 5, 9)) == (4, 9)
    assert least(np.array([2.0, 1.0, np.nan, 1.0]), 4, (1, 4, 5, 9)) == (1, 4, 5, 9)


@torch.no_grad()
def turn(model: PreTrainedModel, ids: torch.Tensor, layers: set[int]) -> float:
    """Of the final state, by removing `layers` for good: a sum over the positions."""
    small = lp.remove_layers(model, sorted(layers))
    states = [m.model(ids)[0][:, :-1].double() for m in (model, small)]
    return float((1 - torch.cosine_similarity(*states, dim=-1)).sum())


def grown(model: PreTrainedModel, ids: torch.Tensor, remove: int, free: Layers) -> Layers:
    """A set that grows by the turn of the final state; every layer is tried anew."""
    gone: set[int] = set()
    for _ in range(remove):
        gone.add(min(set(free) - gone, key=lambda layer: turn(model, ids, {*gone, layer})))
    return tuple(sorted(gone))


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
    wanted["grown"] = grown(llama, ids[::2, : ids.shape[1] // 2], 2, free)
    reading = read(wrap(llama), ids)
    found = {by: s for source in SOURCES.values() for by, s in source.sets(reading, 2, free, 1).items()}
    assert found == wanted


def test_a_layer_alone_turns_the_final_state_by_its_angle(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    few = ids[::2, : ids.shape[1] // 2]
    wanted = [turn(llama, few, {layer}) for layer in FREE]
    np.testing.assert_allclose(end_turns(read(wrap(llama), ids), 1), wanted, rtol=1e-4)


# Swaps.


def test_turns_at_the_end_add_up_and_one_that_is_not_finite_counts_as_the_largest() -> None:
    turns = np.array([1.0, np.nan, 4.0, np.inf, 2.0])
    assert [turn_at_the_end(turns, layers) for layers in ((0, 4), (1, 2), (0, 3))] == [3, 8, 5]
    sets = list(swaps((0, 2), tuple(range(5)), {(0, 2): 1.0}, partial(turn_at_the_end, turns)))
    assert sets[0] == (0, 4)


@settings(max_examples=30)
@given(DISTANCES, st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE - 1))
def test_every_swap_comes_once_and_none_that_was_tried(distance: np.ndarray, chosen: set[int]) -> None:
    current, free = tuple(sorted(chosen)), tuple(range(SIZE))
    every = [s for s in combinations(free, len(current)) if len(set(s) - chosen) == 1]
    tried = {current: 1.0, every[0]: float("inf"), every[-1]: -0.1}
    found = list(swaps(current, free, tried, partial(turn_on_the_way, distance)))
    assert sorted(found) == sorted(set(every) - set(tried))


def test_layers_that_cost_much_where_they_were_tried_come_last() -> None:
    distance = 1 - np.eye(SIZE + 1)
    tried = {(0, 2): 0.1, (0, 4): 5.0, (4, 6): 5.0, (1, 6): 0.1}
    found = list(swaps((0, 2), tuple(range(SIZE)), tried, partial(turn_on_the_way, distance)))
    assert found[-1] == (2, 4)
    assert {*found[0]} & {1, 6}


def ridge(tried: dict[Layers, float], distance: np.ndarray, wanted: list[Layers]) -> np.ndarray:
    """A weight a layer by ridge regression in its usual form, the intercept taken as the mean of what is left over."""

    def base(layers: Layers) -> float:
        runs = [[layers[0]]]
        for layer in layers[1:]:
            runs[-1].append(layer) if layer == runs[-1][-1] + 1 else runs.append([layer])
        return float(np.log(max(sum(distance[run[0], run[-1] + 1] for run in runs), 1e-9)))

    finite = {layers: loss for layers, loss in tried.items() if np.isfinite(loss)}
    X = np.array([[float(layer in layers) for layer in range(SIZE)] for layers in finite])
    y = np.array([np.log(max(loss, 1e-3)) - base(layers) for layers, loss in finite.items()])
    w = np.linalg.solve(X.T @ X + 0.3 * np.eye(SIZE), X.T @ (y - y.mean()))
    return np.array([base(layers) + sum(w[layer] for layer in layers) for layers in wanted])


@settings(max_examples=50)
@given(DISTANCES, st.integers(0, 2**32 - 1))
def test_what_a_swap_should_cost_is_a_ridge_regression(distance: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    distance = distance.copy()
    distance[2, 3] = 0  # a layer that does nothing
    sets = list(combinations(FREE, 2))
    rng.shuffle(sets)
    tried = {tuple(s): float(loss) for s, loss in zip(sets[:6], rng.exponential(size=6), strict=True)}
    tried[tuple(sets[0])], tried[tuple(sets[1])] = float("inf"), -0.5  # no loss, and one below the dense
    wanted = [tuple(s) for s in sets[6:]] + [(2,)]
    found = _expected(wanted, tried, partial(turn_on_the_way, distance))
    np.testing.assert_allclose(found, ridge(tried, distance, wanted), rtol=1e-9)


def test_what_a_part_of_a_forward_costs() -> None:
    """Ten layers of a tenth of 0.8 each, the head 0.2, twice as many tokens scored as checked."""
    cost = SearchCost(0.8, 10, 2.0)
    assert cost.head == pytest.approx(0.2)
    assert cost.without((), 0) == pytest.approx(1)
    assert cost.without((3, 4), 0) == pytest.approx(0.8 * 8 / 10 + 0.2)
    assert cost.without((3, 4), 4) == pytest.approx(0.8 * 5 / 10 + 0.2)  # from layer 4 on, which is passed over
    assert cost.without((3, 4), 5) == pytest.approx(0.8 * 5 / 10 + 0.2)
    trials = (0.8 * 5 / 10 + 0.2) + (0.8 * 2 / 10 + 0.2)  # from 2 on without 3, 4 and 8; from 7 on without 8
    assert cost.mending((3, 4, 8), 0.25) == pytest.approx(2.0 * (2 * 0.8 + 0.25 * TRIALS * trials))
    # Clean and two seeds, with Block Influence a fourth row.
    assert SOURCES["rho"].cost(cost, 3) == pytest.approx(0.8 * 4)
    # A quarter of the tokens: dense, once more and from every layer on; then of nine and of eight layers one pass and
    # four halves.
    assert SOURCES["grown"].cost(cost, 3) == pytest.approx(0.8 * (2 + 45 / 10 + (0.9 + 0.8) * 3) / 4)
    # Dense, and from every layer on: of ten layers nine, eight … none are run, five and a half of eleven on the mean.
    assert SOURCES["kl"].cost(cost, 3) == pytest.approx(11 * (0.8 / 2 + 0.2))


def test_the_cost_is_of_the_parameters_that_multiply(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    cost = SearchCost.of(read(wrap(llama), ids[:1]), read(wrap(llama), ids))
    inside = sum(p.numel() for name, p in llama.named_parameters() if ".layers." in name)
    assert cost == SearchCost(inside / (inside + 97 * 32), LAYERS, 3.0)
