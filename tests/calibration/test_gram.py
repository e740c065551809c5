"""Damping and roots of Gram matrices against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.gram import damped, root, scaled
from lyapunov_prune.errors import LyapunovPruneError

CPU = torch.device("cpu")


def inputs(seed: int, n: int, tokens: int) -> torch.Tensor:
    return torch.randn(n, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 12))
def test_the_root_of_a_gram_matrix_with_fewer_tokens_too(seed: int, n: int, tokens: int) -> None:
    X = inputs(seed, n, tokens)
    S = root(X @ X.T)
    scale = float(torch.linalg.matrix_norm(X)) ** 2
    np.testing.assert_allclose(S @ S, X @ X.T, atol=1e-12 * scale)
    np.testing.assert_allclose(S, S.T, atol=1e-12 * scale)
    if tokens > n + 2:
        np.testing.assert_allclose(S, scipy.linalg.sqrtm((X @ X.T).numpy()).real, atol=1e-9 * scale)


def test_damping_follows_the_scale_and_leaves_the_statistics_alone() -> None:
    G = torch.tensor([[4.0, 1.0], [1.0, 0.0]], dtype=torch.float32)
    before = G.clone()
    found = damped(G, 0.1, CPU)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, [[4.2, 1], [1, 0.2]])
    np.testing.assert_allclose(damped(1e6 * G, 0.1, CPU), 1e6 * found)
    assert torch.equal(G, before)
    wide = G.double()
    assert damped(wide, 0.0, CPU).data_ptr() != wide.data_ptr()


def test_what_is_no_gram_matrix_is_refused() -> None:
    for gram in (torch.zeros(2, 2), -torch.eye(2)):
        with pytest.raises(LyapunovPruneError, match="no nonzero input"):
            damped(gram, 0.1, CPU)
    with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
        damped(torch.full((2, 2), torch.nan), 0.1, CPU)
    with pytest.raises(LyapunovPruneError, match="negative eigenvalue"):
        root(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))


def test_the_exponent_lies_on_the_device_of_the_matrix() -> None:
    """`ldexp` of a GPU's tensor refuses an exponent on the CPU; the meta device stands for the GPU."""
    _, exponent = scaled(torch.empty(3, 3, dtype=torch.float64, device="meta"))
    assert exponent.device.type == "meta"
    x, exponent = scaled(torch.tensor([[3.0, -12.0]], dtype=torch.float64))
    assert (int(exponent), x.tolist()) == (4, [[0.1875, -0.75]])
    assert int(scaled(torch.empty(0, 2, dtype=torch.float64))[1]) == 0
