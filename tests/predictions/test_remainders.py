"""The derived bounds of the angles: sampled inside their range, seen to fail outside, tight for small changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import predictions_by_definition, turned
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import PreTrainedModel

from lyapunov_prune import compress, probe_layers
from lyapunov_prune.predictions.remainders import ROUNDING, angle_bounds, probability_angle_bounds

LOGITS = arrays(np.float64, (3, 7), elements=st.floats(-8, 8))
ROUND = 1e-12  # of an angle that is computed as 1 − cos


def parts(v: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    along = (v * delta).sum(-1, keepdims=True) * v / (v * v).sum(-1, keepdims=True)
    size = np.linalg.norm(v, axis=-1)
    return np.linalg.norm(along, axis=-1) / size, np.linalg.norm(delta - along, axis=-1) / size


def drawn(seed: int, size: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    v, delta = generator.normal(size=(2, 500, 6))
    v /= np.linalg.norm(v, axis=-1, keepdims=True)
    return v, delta * size / np.linalg.norm(delta, axis=-1, keepdims=True)


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 0.9, 0.999, 1.0, 3.0])
def test_the_angle_of_a_vector_lies_within_its_bounds(size: float) -> None:
    for seed in range(5):
        v, delta = drawn(seed, size)
        a, b = parts(v, delta)
        low, high = angle_bounds(a, b)
        inside = a < 1
        assert inside.any()
        assert np.isnan(high[~inside]).all()
        angle = turned(v, v + delta)[inside]
        assert (angle <= high[inside] * (1 + ROUNDING) + ROUND).all()
        assert (angle >= low[inside] * (1 - ROUNDING) - ROUND).all()


def test_a_vector_turned_beyond_a_right_angle_is_outside_the_range() -> None:
    """Δ = −2v and a little across: the formula would say that next to nothing turned."""
    v = np.array([[1.0, 0.0]])
    delta = np.array([[-3.0, 0.1]])
    a, b = parts(v, delta)
    assert a[0] > 1
    formula = b**2 / (2 * (1 - a) ** 2)
    assert turned(v, v + delta)[0] > 100 * formula[0]
    assert np.isnan(angle_bounds(a, b)[1]).all()


@settings(max_examples=300)
@given(LOGITS, LOGITS, st.floats(1e-3, 4))
def test_the_angle_of_probabilities_lies_within_its_bounds(z: np.ndarray, dz: np.ndarray, scale: float) -> None:
    made = predictions_by_definition(z, scale * dz / 4, 1.0)
    low, high = probability_angle_bounds(2 * made["probability_estimate"], made["deviation_r"])
    assert (made["probability"] <= high * (1 + ROUNDING) + ROUND).all()
    assert (made["probability"] >= low * (1 - ROUNDING) - ROUND).all()
    assert (high <= 1).all()


def test_a_deviation_that_is_too_small_is_outside_the_range() -> None:
    """Planted fault: half of c, and the deviation under p in the place of that under r."""
    generator = np.random.default_rng(0)
    z, dz = generator.normal(size=(2, 2000, 5)) * [[[2.0]], [[1.5]]]
    made = predictions_by_definition(z, dz, 1.0)
    V, c = 2 * made["probability_estimate"], made["deviation_r"]
    assert (made["probability"] <= probability_angle_bounds(V, c)[1] + ROUND).all()
    assert (made["probability"] > probability_angle_bounds(V, 0 * c)[1] + ROUND).any()
    assert (made["probability"] < probability_angle_bounds(V, 0 * c)[0] - ROUND).any()


def test_both_are_the_estimates_where_the_change_is_small() -> None:
    for size in (1e-1, 1e-2, 1e-3):
        v, delta = drawn(0, size)
        a, b = parts(v, delta)
        for bound in angle_bounds(a, b):
            assert np.abs(bound / (b**2 / 2) - 1).max() < 3 * size
        z, dz = np.random.default_rng(1).normal(size=(2, 50, 9))
        made = predictions_by_definition(z, size * dz, 1.0)
        c = made["deviation_r"]
        for bound in probability_angle_bounds(2 * made["probability_estimate"], c):
            assert (np.abs(bound / made["probability_estimate"] - 1) < 3 * c + c**2).all()


def test_a_huge_deviation_bounds_nothing_and_does_not_overflow() -> None:
    low, high = probability_angle_bounds(np.array([1e4, 0.0]), np.array([1e6, 1e6]))
    assert low.tolist() == [0.0, 0.0]
    assert high.tolist() == [1.0, 0.0]


def test_a_probe_holds_its_angles_against_them(llama: PreTrainedModel) -> None:
    prompts = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(0))
    for change in ("dropped", compress(llama, method="rtn", bits=8).model):
        found = probe_layers(llama, prompts, steps=3, change=change)
        assert found.exceeded == 0
        assert found.derived > found.kl.size
        assert f"0 of {found.derived} angles above the bounds derived" in found.headline()
        for space in ("hidden", "logit", "probability"):
            angle, bound = getattr(found, space), getattr(found, f"{space}_bound")
            known = np.isfinite(bound)
            assert (angle[known] <= bound[known] * (1 + ROUNDING)).all()
