"""Distances between boundaries, and the runs they choose, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import KINDS, LAYERS, as_batch, make_tiny, states_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError, block_influence
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.ranking import AngularDistance, angular_distance


@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_definition_in_float64(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name)
    found = angular_distance(model, ids)
    states = states_of(model.double(), ids)
    wanted = [[1 - torch.nn.functional.cosine_similarity(a, b, dim=-1).mean() for b in states] for a in states]
    np.testing.assert_allclose(found.distance, wanted, rtol=1e-4, atol=1e-12)


def test_of_single_layers_it_is_block_influence(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    np.testing.assert_allclose(
        angular_distance(llama, ids, batch_size=2).begins(1), block_influence(llama, ids).influence, rtol=1e-5
    )


def test_a_run_that_does_nothing_goes_first(ids: torch.Tensor) -> None:
    """Two layers that undo each other: Block Influence would keep both."""
    model = make_tiny("llama")
    first, second = (find_structure(model).layers[k] for k in (2, 3))
    turn = torch.nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        torch.nn.init.orthogonal_(turn.weight)
    first.forward = lambda hidden_states, *args, **kwargs: turn(hidden_states)
    second.forward = lambda hidden_states, *args, **kwargs: hidden_states @ turn.weight
    found = angular_distance(model, ids)
    assert found.plan(2).remove == (2, 3)
    assert set(rank := np.argsort(block_influence(model, ids).influence)[-2:].tolist()) == {2, 3}, rank


DISTANCES = arrays(np.float64, (LAYERS + 1, LAYERS + 1), elements=st.floats(0, 2))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DISTANCES, st.integers(1, LAYERS - 1))
def test_no_run_of_that_length_is_nearer(llama: PreTrainedModel, distance: np.ndarray, count: int) -> None:
    found = AngularDistance(distance, as_batch(llama, torch.arange(4)[None]).measured_on(llama))
    plan = found.plan(count)
    first = plan.remove[0]
    assert plan.remove == tuple(range(first, first + count))
    each = [distance[k, k + count] for k in range(LAYERS + 1 - count)]
    assert distance[first, first + count] == min(each)
    assert first == each.index(min(each))  # of equal ones the first


def test_it_prints_the_nearest_run_of_every_length_and_comes_back(
    llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path
) -> None:
    found = angular_distance(llama, ids)
    assert list(found.to_frame().layers) == list(range(1, LAYERS))
    again = AngularDistance.load(found.save(tmp_path / "angular.json"))
    np.testing.assert_array_equal(again.distance, found.distance)
    assert again.plan(3).remove == found.plan(3).remove


@pytest.mark.parametrize("count", [0, LAYERS, LAYERS + 3])
def test_a_run_must_leave_a_layer(count: int, llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=r"cannot remove|remove is 0"):
        angular_distance(llama, ids).plan(count)


def test_planted_fault_the_first_state_that_is_not_finite_is_named(ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    model.model.layers[2].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="output of layer 2"):
        angular_distance(model, ids)
