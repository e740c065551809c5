"""AWQ against its search written out over inputs, and its order of merit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.methods.awq import AWQ
from lyapunov_prune.compression.methods.rtn import RoundToNearest


def drawn(seed: int, m: int = 8, n: int = 16, tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and inputs of which a few are far larger, as in a language model."""
    g = torch.Generator().manual_seed(seed)
    size = torch.randn(n, 1, generator=g, dtype=torch.float64).mul(1.5).exp()
    return torch.randn(m, n, generator=g, dtype=torch.float64), size * torch.randn(
        n, tokens, generator=g, dtype=torch.float64
    )


def sums(X: torch.Tensor) -> Statistics:
    return Statistics(X.norm(dim=1), X @ X.T, magnitudes=X.abs().sum(1))


def awq(W: torch.Tensor, X: torch.Tensor, bits: float, **options: Any) -> torch.Tensor:
    return AWQ(**options)(W, bits, sums(X))


def nearest(row: np.ndarray, bits: int) -> np.ndarray:
    """The even grid over the range of a group, zero in it."""
    step = (max(row.max(), 0.0) - min(row.min(), 0.0)) / (2**bits - 1)
    zero = np.round(-min(row.min(), 0.0) / step)
    return step * (np.clip(np.round(row / step) + zero, 0, 2**bits - 1) - zero)


def reference(W: np.ndarray, X: np.ndarray, bits: int, size: int) -> np.ndarray:
    found = []
    for alpha in np.arange(20) / 20:
        s = np.abs(X).mean(1) ** alpha
        scaled = (W * s).reshape(len(W), -1, size)
        rounded = np.array([[nearest(group, bits) for group in row] for row in scaled]).reshape(W.shape) / s
        found.append((float((((rounded - W) @ X) ** 2).sum()), rounded))
    return min(found, key=lambda each: each[0])[1]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4]), st.sampled_from([4, 8, 16]))
def test_every_weight_is_the_references(seed: int, bits: int, size: int) -> None:
    W, X = drawn(seed)
    found = awq(W, X, bits, group_size=size)
    np.testing.assert_allclose(found, reference(W.numpy(), X.numpy(), bits, size), atol=1e-9)


@pytest.mark.parametrize("bits", [1.58, 2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_are_never_further_than_by_rounding_to_nearest(bits: float, symmetric: bool) -> None:
    ratios = []
    for seed in range(20):
        W, X = drawn(seed)
        mine, theirs = awq(W, X, bits, symmetric=symmetric), RoundToNearest(None, symmetric)(W, bits)
        ratios.append(float(((mine - W) @ X).norm() / ((theirs - W) @ X).norm()))
    assert max(ratios) <= 1 + 1e-12
    assert np.mean(ratios) < 0.9 or bits == 1.58  # three values cut off what is scaled up


def test_inputs_that_are_alike_are_rounded_to_nearest_and_dead_ones_do_no_harm() -> None:
    W, X = drawn(1)
    torch.testing.assert_close(awq(W, X.sign(), 3), RoundToNearest()(W, 3))
    X[3] = 0
    found = awq(W, X, 3)
    assert found.isfinite().all()


def test_the_scale_of_the_inputs_is_of_no_matter() -> None:
    W, X = drawn(2)
    torch.testing.assert_close(awq(W, X * 2.0**-20, 3), awq(W, X, 3), rtol=1e-9, atol=1e-12)
