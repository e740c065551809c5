"""Masks against their definition in plain Python, entry by entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.compression.masks import as_pattern, n_of_m, per_row, require_pattern, row_mask
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import smallest

seeds = st.integers(0, 2**32 - 1)


def scores(seed: int, m: int, n: int, ties: bool) -> torch.Tensor:
    score = torch.rand(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (3 * score).floor() if ties else score


def least(values: list[float], count: int) -> list[bool]:
    """Of equal values the earlier goes."""
    gone = set(sorted(range(len(values)), key=lambda j: (values[j], j))[:count])
    return [j in gone for j in range(len(values))]


@settings(max_examples=50)
@given(seeds, st.integers(1, 7), st.integers(1, 7), st.floats(0, 1), st.booleans())
def test_the_smallest_of_all_and_of_each_row_go(seed: int, m: int, n: int, share: float, ties: bool) -> None:
    score = scores(seed, m, n, ties)
    count = round(share * m * n)
    assert smallest(score, count).flatten().tolist() == least(score.flatten().tolist(), count)
    wanted = [least(row, round(share * n)) for row in score.tolist()]
    assert per_row(score, share).tolist() == wanted
    assert row_mask(score, share, None).tolist() == wanted


@settings(max_examples=50)
@given(seeds, st.integers(1, 5), st.integers(1, 4), st.integers(2, 7), st.booleans(), st.data())
def test_the_best_of_each_group_stay(seed: int, m: int, groups: int, of: int, ties: bool, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, of - 1))
    score = scores(seed, m, groups * of, ties)
    removed = n_of_m(score.T.contiguous().T, keep, of)  # columns first in memory
    wanted = [least(group, of - keep) for group in score.reshape(-1, of).tolist()]
    assert removed.reshape(-1, of).tolist() == wanted
    assert torch.equal(row_mask(score, 1 - keep / of, (keep, of)), removed)


@pytest.mark.parametrize("keep", [0, 4, 5, -1])
def test_a_pattern_that_keeps_all_or_nothing_is_refused(keep: int) -> None:
    with pytest.raises(LyapunovPruneError, match="write it as 2:4"):
        n_of_m(torch.ones(2, 8), keep, 4)


def test_a_pattern_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match=r"2:4 .* 6 inputs"):
        n_of_m(torch.ones(2, 6), 2, 4)
    with pytest.raises(LyapunovPruneError, match=r"1:4 has sparsity 0\.75, not 0\.5"):
        require_pattern((1, 4), 8, 0.5)
    with pytest.raises(LyapunovPruneError, match="write it as 2:4"):
        require_pattern((0, 0), 8, 0.5)
    require_pattern((1, 3), 9, 2 / 3)


def test_a_pattern_is_spelled_with_a_colon() -> None:
    assert as_pattern("2:4") == as_pattern((2, 4)) == (2, 4)
    assert as_pattern("3:16") == (3, 16)
    assert as_pattern(None) is None
    for none in ("2-4", "2:", ":4", "2:4:8", "2:4000000000", "x:4"):
        with pytest.raises(LyapunovPruneError, match="write it as 2:4"):
            as_pattern(none)
    with pytest.raises(LyapunovPruneError, match="write it as 2:4"):
        as_pattern("4:4")


def test_a_pattern_is_held_to_its_sparsity() -> None:
    """Within rounding of a share that was divided, and no further."""
    require_pattern((1, 3), 9, 2 / 3 + 5e-10)
    for off in (1e-6, -1e-6):
        with pytest.raises(LyapunovPruneError, match="has sparsity"):
            require_pattern((1, 3), 9, 2 / 3 + off)
