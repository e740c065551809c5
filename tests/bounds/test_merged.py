"""The checkers on merging: by sampling what they bound, at inputs that attain it, and with planted faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import rand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lyapunov_prune.bounds.checkers import activation_replacement_bound, merged_projection, opNorm_merged_le
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import certified_norm, certify
from lyapunov_prune.merging.merge import merge_rounding, product
from lyapunov_prune.merging.reduction import HiddenMap


def norm(x: torch.Tensor) -> np.ndarray:
    return torch.linalg.vector_norm(x, dim=-1).numpy()


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.floats(-8, 8))
def test_a_replaced_activation_stays_within_its_bound(seed: int, outputs: int, hidden: int, scale: float) -> None:
    """Plain: σ of a, against an affine τ of a. Gated: σ(g) ⊙ u of the pair, against c ⊙ u."""
    W, b = rand(outputs, hidden, seed=seed), rand(outputs, seed=seed + 1)
    g, u = (10**scale * rand(50, hidden, seed=seed + k) for k in (2, 3))
    alpha, beta = rand(hidden, seed=seed + 4), rand(hidden, seed=seed + 5)
    for h, tau in (
        (nn.functional.gelu(g), g),
        (nn.functional.relu(g), alpha * g + beta),
        (nn.functional.silu(g) * u, alpha * u),
    ):
        error = norm(nn.functional.linear(h, W, b) - nn.functional.linear(tau, W, b))
        rounding = 2.0**-45 * norm(W.reshape(-1)) * (norm(h) + norm(tau)) + 2.0**-45 * norm(b)
        assert activation_replacement_bound(error, norm(h - tau), certified_norm(W), rounding=rounding).holds


@pytest.mark.parametrize("seed", range(5))
def test_planted_fault_a_bound_scaled_by_99_percent_is_seen(seed: int) -> None:
    """At the change that the last matrix stretches most, and at the input that two matrices in line stretch most."""
    W2 = rand(24, 40, seed=seed)
    most = certify(W2)
    change = 3 * most.direction.unsqueeze(0)
    check = activation_replacement_bound(norm(change @ W2.T), norm(change), most.bound, matrix="m", layer=2)
    assert check.holds
    assert 0.999 < check.ratio < 1
    assert (check.theorem, check.matrix, check.layer) == ("activation_replacement_bound", "m", 2)
    assert not activation_replacement_bound(norm(change @ W2.T), norm(change), 0.99 * most.bound).holds

    _, s, V = torch.linalg.svd(W2, full_matrices=False)
    W1 = V.T @ torch.diag(s) @ V  # of the same singular vectors: the product has the product of the norms
    W = W2 @ W1
    x = 7 * certify(W).direction.unsqueeze(0)
    norms = (certified_norm(W2), certified_norm(W1))
    check = opNorm_merged_le(norm(x @ W.T), norm(x), *norms)
    assert check.holds
    assert 0.998 < check.ratio < 1
    assert not opNorm_merged_le(norm(x @ W.T), norm(x), 0.99 * norms[0], norms[1]).holds
    assert not opNorm_merged_le(norm(x @ W.T), norm(x), norms[0], 0.99 * norms[1]).holds


def test_a_merged_matrix_is_no_larger_than_the_product() -> None:
    for seed in range(20):
        W2, W1 = rand(9, 14, seed=seed), rand(14, 6, seed=seed + 100)
        most = certify(W2 @ W1)
        assert opNorm_merged_le(most.estimate, 1.0, certified_norm(W2), certified_norm(W1)).holds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_projection_is_exact_but_for_rounding(dtype: torch.dtype) -> None:
    """No false alarm in any dtype at any size; a change of the stored matrix that rounding cannot make is seen."""
    for seed, size in enumerate([1e-12, 1e-6, 1.0, 1e6, 1e12]):
        out = (rand(20, 33, seed=seed).to(dtype), rand(20, seed=seed + 1).to(dtype))
        tau = HiddenMap(rand(33, 17, seed=seed + 2), rand(33, seed=seed + 3))
        exact_W, exact_b = product(out, tau)
        assert exact_b is not None
        W, b = exact_W.to(dtype), exact_b.to(dtype)
        x = size * rand(64, 17, seed=seed + 4)

        def check(
            W: torch.Tensor, b: torch.Tensor, x: torch.Tensor = x, out: tuple = out, tau: HiddenMap = tau
        ) -> bool:
            two = nn.functional.linear(tau(x), out[0].double(), out[1].double())
            one = nn.functional.linear(x, W.double(), b.double())
            rounding = merge_rounding(out, tau, (W, b), norm(x), 0 * norm(x))
            found = merged_projection(norm(one - two), rounding=rounding, matrix="m", layer=1)
            assert found.bound == 0
            assert found.margin == rounding[np.argmax(norm(one - two) / rounding)]
            return found.holds

        assert check(W, b)
        more = 1 + 10 * torch.finfo(dtype).eps + 1e-10
        assert not check((exact_W * more).to(dtype), b) or size < 1
        assert not check(W, (exact_b * more).to(dtype)) or size > 1e-6


def test_what_is_no_check() -> None:
    with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
        merged_projection([np.nan], rounding=1.0)
    with pytest.raises(LyapunovPruneError, match="no inputs"):
        activation_replacement_bound([], [], 1.0)
    with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
        opNorm_merged_le(1.0, 1.0, np.inf, 1.0)
