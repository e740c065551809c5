"""Drift against the formula of linear CKA, and what it must not notice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.sensitivity.drift import Reference

seeds = st.integers(0, 2**32 - 1)


def states(seed: int, n: int = 30, d: int = 6) -> torch.Tensor:
    """Tokens × d, of unequal spread and away from the origin."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64) * torch.arange(1, d + 1) + 3 * torch.randn(
        d, generator=g, dtype=torch.float64
    )


def formula(x: np.ndarray, y: np.ndarray) -> float:
    """1 − CKA from the n × n kernels (Kornblith et al., eq. 3 and 4)."""
    n = len(x)
    H = np.eye(n) - np.ones((n, n)) / n
    K, M = H @ x @ x.T @ H, H @ y @ y.T @ H
    return 1 - np.trace(K @ M) / math.sqrt(np.trace(K @ K) * np.trace(M @ M))


def drift(x: torch.Tensor, y: torch.Tensor) -> float:
    return Reference([x]).drift([y])


@settings(max_examples=50)
@given(seeds, st.integers(3, 40), st.integers(1, 8), st.floats(0.01, 10))
def test_drift_is_one_minus_cka(seed: int, n: int, d: int, noise: float) -> None:
    x = states(seed, n, d)
    y = x + noise * states(seed // 2 + 1, n, d)
    assert drift(x, y) == pytest.approx(formula(x.numpy(), y.numpy()), abs=1e-9)
    assert -1e-12 <= drift(x, y) <= 1 + 1e-12


@settings(max_examples=30)
@given(seeds, st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_drift_ignores_rotation_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    x, y = states(seed), states(seed // 3 + 1)
    Q, _ = torch.linalg.qr(states(seed // 5, 6, 6))
    assert drift(x, x) == pytest.approx(0, abs=1e-12)
    assert drift(x, scale * (x @ Q + shift)) == pytest.approx(0, abs=1e-9)
    assert drift(x, -scale * (y @ Q + shift)) == pytest.approx(drift(x, y), abs=1e-9)
    assert drift(scale * (x @ Q + shift), y) == pytest.approx(drift(x, y), abs=1e-9)


@settings(max_examples=20)
@given(seeds, st.integers(1, 29))
def test_drift_does_not_depend_on_how_tokens_are_batched(seed: int, cut: int) -> None:
    x, y = states(seed), states(seed // 3 + 1)
    split = Reference([x[:cut], x[cut:]]).drift([y[:cut], y[cut:]])
    assert split == pytest.approx(drift(x, y), abs=1e-12)
    windows = Reference([x.view(5, 6, 6)]).drift([y.view(5, 6, 6)])
    assert windows == pytest.approx(drift(x, y), abs=1e-12)


def test_drift_is_symmetric_and_grows_with_noise() -> None:
    x, noise = states(0), states(1)
    found = [drift(x, x + t * noise) for t in (0, 0.1, 0.3, 1, 3)]
    assert found == sorted(found)
    assert found[-1] > 0.1
    assert drift(x, noise) == pytest.approx(drift(noise, x), abs=1e-12)


def test_states_that_share_nothing_have_drift_one() -> None:
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    y = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    assert drift(x, y) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_narrow_dtype_is_widened(dtype: torch.dtype) -> None:
    """Beside a mean of 100 the spread is lost in float16 sums."""
    x, y = (states(0) + 100).to(dtype), (states(1) + 100).to(dtype)
    assert drift(x, y) == pytest.approx(formula(x.double().numpy(), y.double().numpy()), abs=1e-9)
    assert drift(x, x) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_have_no_drift(bad: float) -> None:
    y = states(1)
    y[3, 2] = bad
    assert math.isnan(drift(states(0), y))


def test_states_without_spread_have_no_drift() -> None:
    assert math.isnan(drift(states(0), torch.zeros(30, 6)))


def test_another_number_of_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Reference([states(0)]).drift([states(0), states(1)])
