"""Directions and predictions against their definitions, and the estimates as the change shrinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import directions_by_definition, predictions_by_definition
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax

from lyapunov_prune.predictions.spaces import HIDDEN, PROBABILITIES, prediction_measures, turn

rows = arrays(np.float64, (3, 9), elements=st.floats(-5, 5).map(lambda x: round(x, 3)))


def named(names: tuple[str, ...], found: torch.Tensor) -> dict[str, np.ndarray]:
    return dict(zip(names, found.numpy(), strict=True))


def predicted(z: np.ndarray, dz: np.ndarray, T: float) -> dict[str, np.ndarray]:
    log_p, log_q = (torch.from_numpy(log_softmax(x / T, axis=-1)) for x in (z, z + dz))
    return named(PROBABILITIES, prediction_measures(log_p, log_q))


def assert_agree(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-7, atol=1e-12, err_msg=name)


@settings(max_examples=150)
@given(v=rows, delta=rows)
def test_directions_are_the_definitions(v: np.ndarray, delta: np.ndarray) -> None:
    v[:, 0] += 20  # away from zero, on both sides
    assert_agree(named(HIDDEN, turn(*map(torch.from_numpy, (v, v + delta)))), directions_by_definition(v, delta))
    back = named(HIDDEN, turn(*map(torch.from_numpy, (v, delta - v))))
    assert_agree(back, directions_by_definition(v, delta - 2 * v))


@settings(max_examples=150)
@given(z=rows, dz=rows, T=st.floats(0.5, 3))
def test_predictions_are_the_definitions(z: np.ndarray, dz: np.ndarray, T: float) -> None:
    assert_agree(predicted(z, dz, T), predictions_by_definition(z, dz, T))


@settings(max_examples=60)
@given(z=rows, dz=rows)
def test_estimates_meet_what_they_estimate_as_the_change_shrinks(z: np.ndarray, dz: np.ndarray) -> None:
    dz += np.linspace(-1, 1, 9)  # no constant, which changes no probability
    dz -= 0.99 * (dz * z).sum(-1, keepdims=True) * z / np.maximum((z**2).sum(-1, keepdims=True), 1)
    z[:, 0] += 20
    for size in (1e-2, 1e-4):
        h = named(HIDDEN, turn(*map(torch.from_numpy, (z, z + size * dz))))
        np.testing.assert_allclose(h["hidden_estimate"], h["hidden"], rtol=20 * size, atol=1e-30)
        p = predicted(z / 20, size * dz, 1.0)
        for name, estimate in (("probability", "probability_estimate"), ("kl", "kl_estimate")):
            np.testing.assert_allclose(p[estimate], p[name], rtol=50 * size, atol=1e-22, err_msg=name)


@pytest.mark.parametrize("fault", ["p for r", "wrong T", "Δ for Δ⊥"])
def test_planted_faults_are_seen(fault: str) -> None:
    rng = np.random.default_rng(0)
    z, dz = rng.normal(size=(2, 3, 9))
    found = predicted(z, dz, 2.0)
    wanted = predictions_by_definition(z, dz, 2.0)
    assert_agree(found, wanted)
    if fault == "p for r":
        found["probability_estimate"] = found["kl_estimate"]
    elif fault == "wrong T":
        wanted = predictions_by_definition(z, dz, 1.0)
    else:
        found = named(HIDDEN, turn(torch.from_numpy(z), torch.from_numpy(z + dz)))
        wanted = directions_by_definition(z, dz)
        found["hidden_orthogonal"] = np.linalg.norm(dz, axis=-1) / np.linalg.norm(z, axis=-1)
    with pytest.raises(AssertionError):
        assert_agree(found, wanted)
