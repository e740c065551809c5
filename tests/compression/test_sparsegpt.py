"""SparseGPT against the optimal brain surgeon's own definition: every remaining Hessian inverted by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import Pattern
from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.compression.methods.sparsegpt import SparseGPT
from lyapunov_prune.compression.methods.wanda import Wanda
from lyapunov_prune.errors import LyapunovPruneError


def sparsegpt(
    W: torch.Tensor, gram: torch.Tensor, sparsity: float, pattern: Pattern | None = None, **options: Any
) -> torch.Tensor:
    return SparseGPT(pattern, **options).compress(W, sparsity, Statistics(gram.diagonal(), gram))


def wanda(W: torch.Tensor, norms: torch.Tensor, sparsity: float) -> torch.Tensor:
    return Wanda().compress(W, sparsity, Statistics(norms))


def correlated(seed: int, m: int, n: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the Gram matrix of inputs that share a few directions and differ in size."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=g, dtype=torch.float64) + 2 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    X = (mix @ torch.randn(n, tokens, generator=g, dtype=torch.float64)) * torch.rand(n, 1, generator=g).exp()
    return torch.randn(m, n, generator=g, dtype=torch.float64), X @ X.T


def surgeon(
    W: np.ndarray, G: np.ndarray, sparsity: float, pattern: tuple[int, int] | None, block: int, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """Column by column: `δw = −w_j / [H_F⁻¹]_00 · [H_F⁻¹]_0` with `H_F` the Hessian of the inputs j … n − 1."""
    (m, n), W = W.shape, W.copy()
    H = G + damping * np.diag(G).mean() * np.eye(n)
    W[:, np.diag(G) == 0] = 0
    if damping == 0:
        H += np.diag(np.diag(G) == 0)
    inverses = [np.linalg.inv(H[j:, j:]) for j in range(n)]
    saliency = np.array([inverse[0, 0] for inverse in inverses])
    gone = np.zeros((m, n), dtype=bool)
    for j in range(n):
        if pattern is not None and j % pattern[1] == 0:
            keep, of = pattern
            for i in range(m):
                score = W[i, j : j + of] ** 2 / saliency[j : j + of]
                gone[i, j + np.argsort(score, kind="stable")[: of - keep]] = True
        if pattern is None and j % block == 0:
            end = min(j + block, n)
            score = W[:, j:end] ** 2 / saliency[j:end]
            count = round(sparsity * m * end) - int(gone.sum())
            flat = np.zeros(score.size, dtype=bool)
            flat[np.argsort(score.ravel(), kind="stable")[:count]] = True
            gone[:, j:end] = flat.reshape(score.shape)
        for i in range(m):
            if gone[i, j]:
                W[i, j:] -= W[i, j] / inverses[j][0, 0] * inverses[j][0]
    return np.where(gone, 0, W), gone


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 17), st.floats(0, 1), st.integers(1, 18))
def test_mask_and_values_are_the_surgeons(seed: int, m: int, n: int, sparsity: float, block: int) -> None:
    W, G = correlated(seed, m, n, 40)
    found = sparsegpt(W, G, sparsity, block=block)
    values, gone = surgeon(W.numpy(), G.numpy(), sparsity, None, block, 0.01)
    np.testing.assert_array_equal(found == 0, gone)
    assert int(gone.sum()) == round(sparsity * m * n)
    np.testing.assert_allclose(found, values, atol=1e-8)


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (1, 3), (5, 6)], ids=str)
@pytest.mark.parametrize("block", [1, 5, 7, 128])
def test_a_pattern_is_the_surgeons_whatever_the_block(pattern: tuple[int, int], block: int) -> None:
    keep, of = pattern
    W, G = correlated(keep + 7 * block, 6, 24, 60)
    found = sparsegpt(W, G, 1 - keep / of, pattern, block=block)
    values, gone = surgeon(W.numpy(), G.numpy(), 0, pattern, block, 0.01)
    np.testing.assert_array_equal(found == 0, gone)
    assert (gone.reshape(-1, of).sum(1) == of - keep).all()
    np.testing.assert_allclose(found, values, atol=1e-8)


def test_the_outputs_are_nearer_than_under_other_masks() -> None:
    """`tr(E H Eᵀ)`, on average over matrices and at the least for every one of them that is drawn here."""
    ratios = []
    for seed in range(12):
        W, G = correlated(seed, 24, 32, 128)
        for sparsity in (0.3, 0.5, 0.7):

            def error(found: torch.Tensor, W: torch.Tensor = W, G: torch.Tensor = G) -> float:
                return float(((W - found) @ G * (W - found)).sum())

            mine = error(sparsegpt(W, G, sparsity, block=8))
            others = [error(wanda(W, G.diagonal().sqrt(), sparsity)), error(Magnitude().compress(W, sparsity))]
            ratios.append([mine / other for other in others])
    assert np.mean(ratios, axis=0).max() < 0.7
    assert np.max(ratios) < 1


def test_without_correlation_nothing_is_moved() -> None:
    """A diagonal Gram matrix: `|w| ‖x‖` over the whole matrix, and the others stay what they were."""
    W, _ = correlated(3, 7, 10, 20)
    norms = torch.arange(1, 11, dtype=torch.float64)
    found = sparsegpt(W, norms.square().diag(), 0.4, damping=0)
    order = (W.abs() * norms).flatten().argsort()[:28]
    wanted = W.flatten().clone()
    wanted[order] = 0
    torch.testing.assert_close(found, wanted.view(7, 10), rtol=0, atol=0)


@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_inputs_that_were_always_zero_lose_their_weights(damping: float) -> None:
    W, G = correlated(5, 4, 9, 40)
    G[3], G[:, 3], G[7], G[:, 7] = 0, 0, 0, 0
    found = sparsegpt(W, G, 0.5, damping=damping, block=4)
    values, gone = surgeon(W.numpy(), G.numpy(), 0.5, None, 4, damping)
    assert not found[:, [3, 7]].any()
    assert int((found == 0).sum()) == round(0.5 * 36)
    np.testing.assert_array_equal(found == 0, gone)
    np.testing.assert_allclose(found, values, atol=1e-8)
    assert int((sparsegpt(W, G, 1 / 36) == 0).sum()) == 8  # more than were asked for


def test_the_scale_of_the_gram_matrix_is_of_no_matter() -> None:
    W, G = correlated(8, 5, 12, 30)
    torch.testing.assert_close(sparsegpt(W, G * 2.0**-40, 0.5), sparsegpt(W, G, 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_result_is_rounded_once_and_the_matrix_kept(dtype: torch.dtype) -> None:
    W, G = correlated(1, 6, 12, 40)
    W = W.to(dtype)
    before, gram = W.clone(), G.clone()
    found = sparsegpt(W, G, 0.5, block=4)
    assert found.dtype == dtype
    assert torch.equal(found, sparsegpt(W.double(), G, 0.5, block=4).to(dtype))
    assert torch.equal(W, before)
    assert torch.equal(G, gram)
    assert torch.equal(sparsegpt(W.T.contiguous().T, G, 0.5, block=4), found)
    assert sparsegpt(W, G, 0.001) is W


def test_what_cannot_be_done_is_refused() -> None:
    W, G = correlated(0, 4, 8, 3)  # three tokens: singular
    with pytest.raises(LyapunovPruneError, match="no inverse"):
        sparsegpt(W, G - 1e-6 * torch.eye(8), 0.5, damping=0)
    with pytest.raises(LyapunovPruneError, match="no nonzero input"):
        sparsegpt(W, 0 * G, 0.5)
    with pytest.raises(LyapunovPruneError, match=r"3:7 .*8 inputs"):
        sparsegpt(W, G, 4 / 7, (3, 7))
    assert math.isfinite(float(sparsegpt(W, G, 0.5).sum()))
