"""GPTQ against its definition: every remaining Hessian inverted by itself, no blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.methods.gptq import GPTQ
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.errors import LyapunovPruneError


def gptq(W: torch.Tensor, gram: torch.Tensor, bits: int, **options: Any) -> torch.Tensor:
    return GPTQ(**options)(W, bits, Statistics(gram.diagonal(), gram))


def correlated(seed: int, m: int, n: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the Gram matrix of inputs that share a few directions and differ in size."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=g, dtype=torch.float64) + 2 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    X = (mix @ torch.randn(n, tokens, generator=g, dtype=torch.float64)) * torch.rand(n, 1, generator=g).exp()
    return torch.randn(m, n, generator=g, dtype=torch.float64), X @ X.T


def nearest(w: float, values: np.ndarray, bits: int, symmetric: bool) -> float:
    """The nearest point of the grid of one group to `w`, from its definition; halves to even."""
    if symmetric:  # the largest weight lies halfway between two points
        step, first = 2 * np.abs(values).max() / (2**bits - 1), -(2 ** (bits - 1))
    else:
        step = (max(values.max(), 0.0) - min(values.min(), 0.0)) / (2**bits - 1)
        first = -np.round(-min(values.min(), 0.0) / step)
    return step * np.clip(np.round(w / step), first, first + 2**bits - 1)


def reference(
    W: np.ndarray, G: np.ndarray, bits: int, group_size: int | None, symmetric: bool, act_order: bool
) -> np.ndarray:
    """Input by input and row by row, without blocks: `δw = −(w_j − q_j) / [H_F⁻¹]_00 · [H_F⁻¹]_0`."""
    (m, n), size, given = W.shape, group_size or W.shape[1], W.copy()
    W = W.copy()
    H = G + 0.01 * np.diag(G).mean() * np.eye(n)
    left = sorted(range(n), key=lambda j: -H[j, j]) if act_order else list(range(n))
    done = np.zeros_like(W)
    while left:
        j, inverse = left[0], np.linalg.inv(H[np.ix_(left, left)])
        for i in range(m):
            start = j // size * size
            done[i, j] = nearest(W[i, j], given[i, start : start + size], bits, symmetric)
            W[i, left] -= (W[i, j] - done[i, j]) / inverse[0, 0] * inverse[0]
        left = left[1:]
    return done


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([None, 4]),
    st.sampled_from([2, 3, 4]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 18),
)
def test_every_weight_is_the_references(
    seed: int, m: int, quarters: int, group_size: int | None, bits: int, symmetric: bool, act_order: bool, block: int
) -> None:
    W, G = correlated(seed, m, 4 * quarters, 40)
    found = gptq(W, G, bits, group_size=group_size, symmetric=symmetric, act_order=act_order, block=block)
    wanted = reference(W.numpy(), G.numpy(), bits, group_size, symmetric, act_order)
    np.testing.assert_allclose(found, wanted, atol=1e-9)


def test_outputs_are_nearer_than_by_rounding_to_nearest() -> None:
    """`‖(W − Ŵ) X‖_F` on correlated inputs: in all but a few draws, and by far on average."""
    ratios = []
    for seed in range(40):
        W, G = correlated(seed, 16, 32, 128)
        for bits in (2, 3, 4):
            E, R = (W - gptq(W, G, bits, group_size=8)), (W - RoundToNearest(8).compress(W, bits))
            ratios.append(float(((E @ G) * E).sum() / ((R @ G) * R).sum()))
    assert np.mean(np.array(ratios) <= 1) > 0.97
    assert np.mean(ratios) < 0.6


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_without_correlation_it_rounds_to_nearest(symmetric: bool, act_order: bool) -> None:
    W, _ = correlated(3, 7, 16, 20)
    for gram in (torch.eye(16, dtype=torch.float64), torch.arange(1, 17, dtype=torch.float64).diag()):
        found = gptq(W, gram, 3, group_size=8, symmetric=symmetric, act_order=act_order)
        assert torch.equal(found, RoundToNearest(8, symmetric).compress(W, 3))


def test_inputs_that_were_always_zero_are_rounded_to_nearest() -> None:
    W, G = correlated(5, 4, 12, 40)
    G[3], G[:, 3], G[7], G[:, 7] = 0, 0, 0, 0
    for damping in (0.0, 0.01):
        found = gptq(W, G, 3, damping=damping)
        assert torch.equal(found[:, [3, 7]], RoundToNearest().compress(W, 3)[:, [3, 7]])


def test_the_scale_of_the_gram_matrix_is_of_no_matter() -> None:
    W, G = correlated(8, 5, 12, 30)
    assert torch.equal(gptq(W, G * 2.0**-40, 3), gptq(W, G, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_stored_is_on_the_grids_of_the_matrix_that_was_given(dtype: torch.dtype, bits: int) -> None:
    """Integers and scales of `rtn` hold every value to the last bit, so that it can be packed."""
    W, G = correlated(1, 6, 16, 40)
    W = W.to(dtype)
    method = GPTQ(8, symmetric=True)
    found = method(W, bits, Statistics(G.diagonal(), G))
    steps = method.steps(W, bits)
    assert found.dtype == dtype
    assert torch.equal(steps.nearest(found.double()).to(dtype), found)
    assert not torch.equal(found, RoundToNearest(8, symmetric=True).compress(W, bits))


def test_what_cannot_be_done_is_refused() -> None:
    W, G = correlated(0, 4, 8, 3)  # three tokens: singular
    with pytest.raises(LyapunovPruneError, match="no inverse"):
        gptq(W, G - 1e-6 * torch.eye(8), 4, damping=0)
    with pytest.raises(LyapunovPruneError, match="no nonzero input"):
        gptq(W, 0 * G, 4)
    with pytest.raises(LyapunovPruneError, match=r"groups of 3 .*8 inputs"):
        gptq(W, G, 4, group_size=3)
    with pytest.raises(LyapunovPruneError, match="damping"):
        GPTQ(damping=-1.0)
