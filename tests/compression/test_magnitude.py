"""Magnitude pruning removes exactly the share asked for, and the smallest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.compression.methods.magnitude import Magnitude
from lyapunov_prune.errors import LyapunovPruneError


def test_sparsify_removes_exactly_the_share_also_among_ties() -> None:
    W = torch.tensor([[1.0, -1.0, 1.0, 1.0], [2.0, 0.5, -3.0, 1.0]])
    assert int((Magnitude().compress(W, 0.5) == 0).sum()) == 4
    assert Magnitude().compress(W, 0.125).tolist() == [[1.0, -1.0, 1.0, 1.0], [2.0, 0.0, -3.0, 1.0]]
    assert torch.equal(Magnitude().compress(W, 0.0), W)
    assert not Magnitude().compress(W, 1.0).any()


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.booleans())
def test_what_stays_is_no_smaller_than_what_goes(seed: int, m: int, n: int, sparsity: float, ties: bool) -> None:
    W = torch.randn(m, n, generator=torch.Generator().manual_seed(seed))
    W = W.sign() * W.abs().mul(2).ceil() if ties else W
    S = Magnitude().compress(W, sparsity)
    gone = S == 0
    assert int(gone.sum()) == round(sparsity * m * n)
    assert torch.equal(S[~gone], W[~gone])
    if gone.any() and not gone.all():
        assert W[gone].abs().max() <= W[~gone].abs().min()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_and_the_matrix_itself_are_kept(dtype: torch.dtype) -> None:
    W = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = W.clone()
    assert Magnitude().compress(W.T, 0.3).shape == (7, 5)
    assert Magnitude().compress(W, 0.3).dtype == dtype
    assert torch.equal(W, before)


def test_a_pattern_keeps_the_largest_of_each_group() -> None:
    W = torch.tensor([[1.0, -4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]])
    assert Magnitude((2, 4)).compress(W, 0.5).tolist() == [[0.0, -4.0, 3.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
    with pytest.raises(LyapunovPruneError, match=r"sparsity 0\.5, not 0\.75"):
        Magnitude((2, 4)).compress(W, 0.75)
