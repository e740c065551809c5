"""Published maps for the gap of a run of layers: exact where a map exists, against numpy, and orthogonal matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_tiny

from experiments.gap_maps import (
    COSINE,
    LEAST_SQUARES,
    PATCH,
    WAYS,
    by_cosine,
    closed,
    hadamard,
    least_squares,
    linear_patch,
    one_run,
    read_gap,
)
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.hooked import hooked


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 8, 12, 20, 24, 576, 640])
def test_a_hadamard_matrix(n: int) -> None:
    H = hadamard(n)
    assert set(np.unique(H)) <= {-1, 1}
    np.testing.assert_array_equal(H @ H.T, n * np.eye(n))


@pytest.mark.parametrize("n", [3, 6, 18])
def test_an_order_that_has_none_is_refused(n: int) -> None:
    with pytest.raises(LyapunovPruneError, match=f"order {n}"):
        hadamard(n)


def test_what_a_matrix_made_is_found() -> None:
    m, residual, T = drawn(50, 8, seed=0), drawn(50, 8, seed=1), drawn(8, 8, seed=2)
    h, y = residual + m, residual + m @ T
    torch.testing.assert_close(least_squares(m, h, y), T)
    found = torch.cosine_similarity(m @ by_cosine(m, h, y) + residual, y, dim=1).mean()
    before = torch.cosine_similarity(h, y, dim=1).mean()
    assert found > 0.999 > before


def test_least_squares_are_those_of_numpy() -> None:
    m, h, y = (drawn(50, 8, seed=s) for s in (3, 4, 5))
    np.testing.assert_allclose(least_squares(m, h, y), np.linalg.lstsq(m, y - h + m, rcond=None)[0], atol=1e-10)


def test_the_patch_takes_back_factors_of_rotated_channels() -> None:
    h = drawn(50, 12, seed=6)
    H = torch.from_numpy(hadamard(12) / np.sqrt(12))
    d = torch.linspace(0.5, 3, 12, dtype=torch.float64)
    y = (h @ H * d) @ H.T
    torch.testing.assert_close(h @ linear_patch(h, y), y)


def test_only_one_run_behind_a_layer() -> None:
    assert one_run([1, 2, 3])
    assert not one_run([0, 1])
    assert not one_run([1, 3])


@torch.no_grad()
def test_on_a_model_the_states_are_its_own_and_the_hook_does_what_was_fitted() -> None:
    model = make_tiny("llama", seed=0)
    batch = TokenBatch(torch.randint(97, (4, 24), generator=torch.Generator().manual_seed(0)), "drawn", "all", None)
    reading = read(wrap(model), batch)
    states = [s.reshape(-1, s.shape[-1]).double() for s in model(batch.ids, output_hidden_states=True).hidden_states]
    gap = read_gap(reading, [1, 2])
    torch.testing.assert_close(gap.h, states[1])
    torch.testing.assert_close(gap.y, states[3])
    patch = linear_patch(gap.h, gap.y)
    for way in WAYS:
        hook = closed(way, gap)
        assert hook is not None
        with hooked(after=[hook]):
            after = reading.prefix.advance(batch.ids[:1], 0, None, 1).flatten(0, 1).double()
        T = {LEAST_SQUARES: least_squares, COSINE: by_cosine}.get(way)
        few = slice(0, 24)
        meant = gap.h[few] @ patch if way == PATCH else gap.h[few] - gap.m[few]
        if T is not None:
            meant = meant + gap.m[few] @ T(gap.m, gap.h, gap.y)
        torch.testing.assert_close(after, meant, rtol=1e-4, atol=1e-5)
