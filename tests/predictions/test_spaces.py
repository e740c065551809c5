"""Directions and predictions against their definitions, and the estimates as the change shrinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import directions_by_definition, predictions_by_definition
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, softmax

from lyapunov_prune.predictions import spaces as module
from lyapunov_prune.predictions.spaces import (
    HIDDEN,
    PROBABILITIES,
    divergences,
    kl_divergence,
    prediction_measures,
    turn,
)

LOGITS = arrays(np.float64, (2, 7), elements=st.floats(-8, 8))


def of(z: np.ndarray, dz: np.ndarray, T: float = 1.0) -> tuple[np.ndarray, ...]:
    given = [torch.tensor(log_softmax(each / T, -1)) for each in (z, z + dz)]
    found = divergences(*given)
    assert torch.equal(kl_divergence(*given), found[1])
    return tuple(x.numpy() for x in found)


def by_definition(z: np.ndarray, dz: np.ndarray, T: float) -> tuple[np.ndarray, ...]:
    found = predictions_by_definition(z, dz, T)
    return found["kl_estimate"], found["kl"], found["reverse_kl"]


@settings(max_examples=200)
@given(LOGITS, LOGITS, st.floats(0.25, 4))
def test_formulas_agree_with_the_definitions(z: np.ndarray, dz: np.ndarray, T: float) -> None:
    for found, wanted in zip(of(z, dz, T), by_definition(z, dz, T), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@settings(max_examples=200)
@given(LOGITS, LOGITS, st.floats(-50, 50))
def test_a_shift_of_all_logits_changes_nothing(z: np.ndarray, dz: np.ndarray, shift: float) -> None:
    for found, wanted in zip(of(z, dz + shift), of(z, dz), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=200)
@given(LOGITS, LOGITS, st.floats(0.25, 4))
def test_theorems_of_the_divergence_hold(z: np.ndarray, dz: np.ndarray, T: float) -> None:
    """`kl_softmax_nonneg`, `kl_softmax_le_range`."""
    _, kl, reverse = of(z, dz, T)
    for found in (kl, reverse):
        assert (found >= -1e-13).all()
        assert (found <= np.ptp(dz, axis=-1) / T + 1e-12).all()


@settings(max_examples=300)
@given(LOGITS, LOGITS, st.floats(0.01, 1), st.floats(0.25, 4))
def test_the_variance_bounds_the_divergence_of_a_small_change(
    z: np.ndarray, dz: np.ndarray, c: float, T: float
) -> None:
    """`kl_softmax_le_variance`: KL ≤ (1/2 + 2c/9) Var_p(Δz/T) when |Δz/T − mean| ≤ c ≤ 1."""
    p = softmax(z / T, axis=-1)
    away = np.abs(dz - (p * dz).sum(-1, keepdims=True)).max(-1, keepdims=True)
    dz = dz * c * T / np.maximum(away, 1e-3)
    half_variance, kl, _ = of(z, dz, T)
    assert (kl <= (1 + 4 * c / 9) * half_variance + 1e-14).all()


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_tiny_changes_keep_their_digits(scale: float) -> None:
    """Against the first three cumulants of Δz under p; `−Σ p u` alone has two digits left at the end."""
    rng = np.random.default_rng(0)
    z, dz = 4 * rng.normal(size=(1, 300)), scale * rng.normal(size=(1, 300))
    p = softmax(z, axis=-1)
    d = dz - (p * dz).sum(-1, keepdims=True)
    half, sixth = (p * d**2).sum(-1) / 2, (p * d**3).sum(-1) / 6
    _, kl, reverse = of(z, dz)
    rtol = scale**2 + 1e-9 / scale * 1e-6
    np.testing.assert_allclose(kl, half + sixth, rtol=rtol)
    np.testing.assert_allclose(reverse, half + 2 * sixth, rtol=rtol)
    u = log_softmax(z + dz, -1) - log_softmax(z, -1)
    if scale == 1e-6:
        assert abs(-(p * u).sum() / (half + sixth) - 1) > 1e-5


def test_exponentials_and_sums_of_float32_logits_are_in_float64() -> None:
    z = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    found = module.log_softmax(z, 1.5)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, log_softmax(z.double().numpy() / 1.5, -1), rtol=1e-14)


def test_huge_logits_do_not_overflow() -> None:
    z = np.array([[0.0, 2000.0, -3000.0]])
    found = of(z, -2 * z)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[1:], [[4000 - 0.0 + 1000], [3000.0 + 2000]], rtol=1e-12)


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
