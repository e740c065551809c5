"""Truncation against numpy's SVD in float64: nothing of that rank is nearer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lyapunov_prune.linalg import basis, truncate

SHAPES = [(12, 30), (30, 12), (16, 16), (1, 9), (9, 1)]


def matrix(m: int, n: int) -> torch.Tensor:
    """Singular values that fall off, as those of weights do."""
    g = torch.Generator().manual_seed(m * n)
    return torch.randn(m, n, generator=g, dtype=torch.float64) * 0.9 ** torch.arange(n)


def truncated(W: torch.Tensor, rank: int) -> torch.Tensor:
    return truncate(W, rank, basis(W))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_that_of_eckart_and_young(shape: tuple[int, int]) -> None:
    W = matrix(*shape)
    U, sigma, Vt = np.linalg.svd(W.numpy(), full_matrices=False)
    for rank in range(1, min(shape)):
        L = truncated(W, rank)
        np.testing.assert_allclose(L, U[:, :rank] * sigma[:rank] @ Vt[:rank], atol=1e-9 * sigma[0])
        left = (W - L).numpy()
        assert np.linalg.norm(left, 2) == pytest.approx(sigma[rank], rel=1e-9)
        assert np.linalg.norm(left) == pytest.approx(np.sqrt((sigma[rank:] ** 2).sum()), rel=1e-9)
        assert np.linalg.matrix_rank(L.numpy()) == rank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rank_that_is_no_restriction_returns_the_matrix_itself(shape: tuple[int, int]) -> None:
    W = matrix(*shape)
    for rank in (min(shape), min(shape) + 1, 1000):
        assert truncated(W, rank) is W


def test_the_basis_is_of_the_smaller_side_in_float64() -> None:
    for shape in SHAPES:
        vectors = basis(matrix(*shape).float())
        assert vectors.shape == (min(shape), min(shape))
        assert vectors.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_narrow_matrix_is_truncated_in_float64_and_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    W = matrix(*shape).to(dtype)
    L = truncated(W, 4)
    assert L.dtype == dtype
    assert torch.equal(L, truncated(W.double(), 4).to(dtype))


def test_equal_singular_values_lose_the_right_amount() -> None:
    for W in (torch.eye(6), torch.eye(6, 9), torch.zeros(6, 9)):
        for rank in (1, 3, 5):
            left = np.linalg.norm((W - truncated(W, rank)).numpy()) ** 2
            assert left == pytest.approx((6 - rank) * float(W.max()), abs=1e-5)
