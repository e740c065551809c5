"""Whitened truncation against its formula with scipy's root and inverse: nothing of that rank is nearer."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.methods.whitened_svd import WhitenedSVD
from lyapunov_prune.errors import LyapunovPruneError


def whitened(W: torch.Tensor, gram: torch.Tensor, rank: int, **options: float) -> torch.Tensor:
    return WhitenedSVD(**options).compress(W, rank, Statistics(gram.diagonal(), gram))


SHAPES = [(7, 12), (12, 7), (9, 9), (1, 6), (6, 1)]


def setting(seed: int, m: int, n: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and inputs whose features differ a thousandfold in size."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, tokens, generator=g, dtype=torch.float64)
    X = torch.randn(n, n, generator=g, dtype=torch.float64) @ X * torch.logspace(0, 3, n, dtype=torch.float64)[:, None]
    return torch.randn(m, n, generator=g, dtype=torch.float64), X


def reference(W: np.ndarray, G: np.ndarray, rank: int, damping: float) -> np.ndarray:
    S = scipy.linalg.cholesky(G + damping * np.diag(G).mean() * np.eye(len(G)), lower=True)
    U, sigma, Vt = scipy.linalg.svd(W @ S, full_matrices=False)
    return U[:, :rank] * sigma[:rank] @ Vt[:rank] @ scipy.linalg.inv(S)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_formula_with_a_cholesky_factor(shape: tuple[int, int]) -> None:
    W, X = setting(1, *shape, 60)
    for rank in range(1, min(shape)):
        wanted = reference(W.numpy(), (X @ X.T).numpy(), rank, 1e-6)
        found = whitened(W, X @ X.T, rank)
        np.testing.assert_allclose(found, wanted, atol=1e-7 * np.abs(wanted).max())
        assert np.linalg.matrix_rank(found) == rank
        # With no damping the error on the inputs is the tail.
        error = torch.linalg.matrix_norm((W - whitened(W, X @ X.T, rank, damping=0)) @ X) ** 2
        tail = (np.linalg.svd((W @ X).numpy(), compute_uv=False)[rank:] ** 2).sum()
        assert float(error) == pytest.approx(tail, rel=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(0, 8))
def test_no_other_matrix_of_the_rank_is_nearer(seed: int, rank: int, nearness: int) -> None:
    W, X = setting(seed, 8, 10, 40)
    found = whitened(W, X @ X.T, rank, damping=0)
    g = torch.Generator().manual_seed(seed)
    U, s, Vt = torch.linalg.svd(found)
    left = U[:, :rank] * s[:rank] + 10.0**-nearness * torch.randn(8, rank, generator=g, dtype=torch.float64)
    # Of all right factors the best one for this left factor.
    other = left @ torch.linalg.lstsq(left, W).solution
    for candidate in (left @ Vt[:rank], other):
        best, rival = (torch.linalg.matrix_norm((W - L) @ X) for L in (found, candidate))
        assert best <= rival * (1 + 1e-10)


def test_the_inputs_decide_and_not_the_weights_alone() -> None:
    """The large weight sees no input: the plain truncation would keep it."""
    W = torch.diag(torch.tensor([10.0, 1.0], dtype=torch.float64))
    gram = torch.diag(torch.tensor([1e-6, 1.0], dtype=torch.float64))
    np.testing.assert_allclose(whitened(W, gram, 1), [[0, 0], [0, 1]], atol=1e-12)


def test_fewer_tokens_than_inputs_will_do() -> None:
    W, X = setting(4, 8, 12, 5)
    for damping, limit in ((0, 1e-9), (1e-6, 1e-3)):
        E = W - whitened(W, X @ X.T, 5, damping=damping)
        assert torch.linalg.matrix_norm(E @ X) < limit * torch.linalg.matrix_norm(W @ X)
    assert whitened(W, X @ X.T, 8) is W


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    W, X = setting(5, 8, 12, 50)
    W = W.to(dtype)
    found = whitened(W, X @ X.T, 3)
    assert found.dtype == dtype
    assert torch.equal(found, whitened(W.double(), X @ X.T, 3).to(dtype))


def test_what_is_no_gram_matrix_is_refused() -> None:
    W, _ = setting(6, 4, 6, 20)
    with pytest.raises(LyapunovPruneError, match="negative eigenvalue"):
        whitened(W, torch.diag(torch.tensor([3.0, 1, 1, 1, 1, -1])), 2)
    with pytest.raises(LyapunovPruneError, match="no nonzero input"):
        whitened(W, torch.zeros(6, 6), 2)
