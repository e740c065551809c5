"""Weight-only pruning against numpy in float64, to the entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.compression.methods.weight_only import WeightOnly
from lyapunov_prune.errors import LyapunovPruneError


def reference(W: np.ndarray, sparsity: float) -> np.ndarray:
    out, size = W.copy(), np.abs(W.astype(np.float64))
    norms = [np.sqrt(sum(column**2)) for column in size.T]
    for row, weights in zip(out, size, strict=True):
        order = sorted(range(len(row)), key=lambda j: (weights[j] * norms[j], j))
        row[order[: round(sparsity * len(row))]] = 0
    return out


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 12), st.floats(0, 1))
def test_the_mask_is_that_of_the_definition(seed: int, m: int, n: int, sparsity: float) -> None:
    W = torch.randn(m, n, generator=torch.Generator().manual_seed(seed))
    found = WeightOnly().compress(W, sparsity)
    np.testing.assert_array_equal(found, reference(W.numpy(), sparsity))
    assert ((found == 0).sum(1) == round(sparsity * n)).all()


def test_columns_count_and_not_rows() -> None:
    """The larger weight goes where its column is small."""
    W = torch.tensor([[2.0, 3.0], [9.0, 1.0]])
    assert WeightOnly().compress(W, 0.5).tolist() == [[2.0, 0.0], [9.0, 0.0]]


def test_a_pattern_keeps_the_best_of_each_group() -> None:
    W = torch.tensor([[1.0, 4.0, 3.0, 2.0], [9.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    found = WeightOnly((2, 4)).compress(W, 0.5)
    assert found.tolist() == [[1.0, 4.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]  # scores 9.06, 16, 9, 4
    assert found.dtype == W.dtype
    with pytest.raises(LyapunovPruneError, match=r"sparsity 0\.5, not 0\.3"):
        WeightOnly((2, 4)).compress(W, 0.3)


def test_a_share_that_rounds_to_nothing_returns_the_matrix_itself() -> None:
    W = torch.randn(3, 4)
    assert WeightOnly().compress(W, 0.1) is W
