"""Balanced truncation against scipy: Gramians of a system from its Lyapunov equations, roots and inverses."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.gram import root
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.methods.balanced import Balanced
from lyapunov_prune.compression.methods.whitened_svd import WhitenedSVD
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import basis, truncate


def balanced(W: torch.Tensor, P: torch.Tensor, Q: torch.Tensor, rank: int, **options: float) -> torch.Tensor:
    return Balanced(**options).compress(W, rank, Statistics(P.diagonal(), P, Q))


def whitened(W: torch.Tensor, gram: torch.Tensor, rank: int, **options: float) -> torch.Tensor:
    return WhitenedSVD(**options).compress(W, rank, Statistics(gram.diagonal(), gram))


SHAPES = [(7, 12), (12, 7), (9, 9), (1, 6)]


def setting(seed: int, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, P and Q."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3 * n, generator=g, dtype=torch.float64) * torch.logspace(0, 2, n, dtype=torch.float64)[:, None]
    G = torch.randn(m, m, generator=g, dtype=torch.float64) @ torch.randn(m, 3 * m, generator=g, dtype=torch.float64)
    return torch.randn(m, n, generator=g, dtype=torch.float64), X @ X.T / (3 * n), G @ G.T / (3 * m)


def hankel_values(W: torch.Tensor, P: torch.Tensor, Q: torch.Tensor) -> torch.Tensor:
    """`σ(Q^½ W P^½)`, largest first, min(m, n) of them: those of `balanced` (Moore 1981, §V)."""
    return torch.linalg.svdvals(root(Q) @ W @ root(P))


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 8), st.integers(1, 8))
def test_hankel_values_are_those_of_a_system_without_memory(seed: int, states: int, m: int, n: int) -> None:
    """`z_{t+1} = A z_t + B u_t, y_t = C z_t` with A = 0 and C B = W: `sqrt(eig(P_z Q_z))` of its Gramians."""
    _, P, Q = setting(seed, m, n)
    g = np.random.default_rng(seed)
    B, C, A = g.normal(size=(states, n)), g.normal(size=(m, states)), np.zeros((states, states))
    controllability = scipy.linalg.solve_discrete_lyapunov(A, B @ P.numpy() @ B.T)
    observability = scipy.linalg.solve_discrete_lyapunov(A.T, C.T @ Q.numpy() @ C)
    wanted = np.sqrt(np.linalg.eigvals(controllability @ observability).real.clip(0))
    found = hankel_values(torch.tensor(C @ B), P, Q)
    assert found.shape == (min(m, n),)
    count = min(states, m, n)
    np.testing.assert_allclose(found[:count], np.sort(wanted)[::-1][:count], rtol=1e-5, atol=1e-7 * wanted.max())
    np.testing.assert_allclose(found[count:], 0, atol=1e-9 * wanted.max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_formula_and_its_error_the_tail(shape: tuple[int, int]) -> None:
    W, P, Q = setting(1, *shape)
    mean_p, mean_q = P.diagonal().mean(), Q.diagonal().mean()
    S = scipy.linalg.sqrtm((P + 1e-6 * mean_p * torch.eye(len(P))).numpy()).real
    A = scipy.linalg.sqrtm((Q + 1e-6 * mean_q * torch.eye(len(Q))).numpy()).real
    U, sigma, Vt = scipy.linalg.svd(A @ W.numpy() @ S, full_matrices=False)
    for rank in range(1, min(shape)):
        wanted = scipy.linalg.inv(A) @ (U[:, :rank] * sigma[:rank] @ Vt[:rank]) @ scipy.linalg.inv(S)
        found = balanced(W, P, Q, rank)
        np.testing.assert_allclose(found, wanted, atol=1e-7 * np.abs(wanted).max())
        assert np.linalg.matrix_rank(found) == rank
        E = W - balanced(W, P, Q, rank, damping=0)
        tail = hankel_values(W, P, Q)[rank:].square().sum()
        assert float(torch.trace(Q @ E @ P @ E.T)) == pytest.approx(float(tail), rel=1e-8)
    assert balanced(W, P, Q, min(shape)) is W


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 8))
def test_no_other_matrix_of_the_rank_is_nearer(seed: int, rank: int, nearness: int) -> None:
    W, P, Q = setting(seed, 6, 8)
    found = balanced(W, P, Q, rank, damping=0)
    g = torch.Generator().manual_seed(seed)
    U, s, Vt = torch.linalg.svd(found)
    right = Vt[:rank] + 10.0**-nearness * torch.randn(rank, 8, generator=g, dtype=torch.float64)

    def error(L: torch.Tensor) -> float:
        return float(torch.trace(Q @ (W - L) @ P @ (W - L).T))

    assert error(found) <= error(U[:, :rank] * s[:rank] @ right) * (1 + 1e-9)
    assert error(found) <= error(truncate(W, rank, basis(W))) * (1 + 1e-9)
    assert error(found) <= error(whitened(W, P, rank, damping=0)) * (1 + 1e-9)


def test_with_outputs_of_equal_worth_it_is_the_whitened_truncation() -> None:
    W, P, _ = setting(2, 7, 10)
    same = balanced(W, P, 5 * torch.eye(7), 3)
    torch.testing.assert_close(same, whitened(W, P, 3), rtol=0, atol=1e-9)
    plain = balanced(W, torch.eye(10), torch.eye(7), 3)
    torch.testing.assert_close(plain, truncate(W, 3, basis(W)), rtol=0, atol=1e-9)


def test_scales_of_the_gramians_change_no_weight() -> None:
    W, P, Q = setting(3, 6, 9)
    torch.testing.assert_close(balanced(W, 1e-5 * P, 1e6 * Q, 2), balanced(W, P, Q, 2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    W, P, Q = setting(4, 6, 9)
    W = W.to(dtype)
    found = balanced(W, P, Q, 3)
    assert found.dtype == dtype
    assert torch.equal(found, balanced(W.double(), P, Q, 3).to(dtype))


def test_gramians_that_do_not_fit_are_refused() -> None:
    W, P, Q = setting(5, 4, 6)
    with pytest.raises(LyapunovPruneError, match="negative eigenvalue"):
        balanced(W, P, -Q + 2 * Q.diagonal().mean() * torch.eye(4), 2)


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-1000])
def test_weights_near_the_largest_float_are_projected_alike(scale: float) -> None:
    """Products of such weights are infinite, and no eigenvalues of those are found."""
    W, P, Q = setting(0, 9, 12)
    for method in (lambda W: balanced(W, P, Q, 3), lambda W: whitened(W, P, 3)):
        assert torch.equal(method(W * scale), method(W) * scale)
    with pytest.raises(LyapunovPruneError, match=r"NaN .*Gram matrix"):
        whitened(W, P * 2.0**1022, 3)
