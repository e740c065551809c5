"""Round to nearest against numpy, value by value, and by what a grid promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_files import symmetric_grid

from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.errors import LyapunovPruneError


def round_to_nearest(
    W: torch.Tensor, bits: int, group_size: int | None = None, symmetric: bool = False
) -> torch.Tensor:
    return RoundToNearest(group_size, symmetric).compress(W, bits)


def grid_of(values: np.ndarray, bits: int) -> np.ndarray:
    """All points of the grid of one row or group: multiples of the step, as many as there are codes."""
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    step = (high - low) / (2**bits - 1) or 1.0
    first = -int(np.round(-low / step))
    return np.array([k * step for k in range(first, first + 2**bits)])


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, 1, 4, 8]),
    st.integers(2, 8),
    st.floats(-3, 3),
)
def test_every_weight_moves_to_the_nearest_point(
    seed: int, m: int, blocks: int, group_size: int | None, bits: int, shift: float
) -> None:
    W = torch.randn(m, 8 * blocks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    found = round_to_nearest(W, bits, group_size)
    width = group_size or 8 * blocks
    for before, after in zip(W.reshape(-1, width).numpy(), found.reshape(-1, width).numpy(), strict=True):
        grid = grid_of(before, bits)
        nearest = np.abs(before[:, None] - grid).min(1)
        np.testing.assert_allclose(np.abs(before - after), nearest, atol=1e-12)
        assert np.abs(after[:, None] - grid).min(1).max() < 1e-12
        assert nearest.max() <= (grid[1] - grid[0]) / 2 * (1 + 1e-12)
        assert len(np.unique(after)) <= 2**bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_weights_are_rounded_once(dtype: torch.dtype) -> None:
    W = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = W.clone()
    found = round_to_nearest(W, 3, 8)
    assert found.dtype == dtype
    assert torch.equal(found, round_to_nearest(W.double(), 3, 8).to(dtype))
    assert max(len(group.unique()) for group in found.view(-1, 8)) <= 8
    assert torch.equal(W, before)
    assert torch.equal(round_to_nearest(W.T.contiguous().T, 3, 8), found)
    for symmetric in (True, False):
        around = round_to_nearest(W, 3, 8, symmetric)
        assert not around[around == 0].signbit().any()  # files are compared by their bits


def test_rows_that_are_constant_zero_or_one_sided() -> None:
    W = torch.tensor([[0.0] * 4, [2.5] * 4, [-0.7] * 4, [3.0, 2.0, 1.0, 0.0], [-5.0, -6.0, 0.0, -6.0]])
    found = round_to_nearest(W, 2)
    torch.testing.assert_close(found[:4], W[:4])
    assert torch.equal(found[W == 0], torch.zeros(int((W == 0).sum())))
    assert found[4].tolist() == [-4.0, -6.0, 0.0, -6.0]


def test_a_range_that_is_symmetric_takes_no_point_more() -> None:
    """Both ends lie halfway between two points, and there is one for the lower end only."""
    assert round_to_nearest(torch.tensor([[-1.5, -1.0, 0.0, 1.0, 1.5]]), 2).tolist() == [[-2.0, -1.0, 0.0, 1.0, 1.0]]


def test_a_row_keeps_its_own_grid() -> None:
    """One large row costs the others nothing; one large weight costs its group and no other."""
    W = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    big = torch.stack([1000 * W[0], W[1]])
    assert torch.equal(round_to_nearest(big, 4)[1], round_to_nearest(W, 4)[1])
    big = W.clone()
    big[0, 0] = 1000
    assert torch.equal(round_to_nearest(big, 4, 8)[0, 8:], round_to_nearest(W, 4, 8)[0, 8:])
    assert not round_to_nearest(big, 4)[0, 8:].any()


@pytest.mark.parametrize("group_size", [3, 0, -4, 8])
def test_groups_that_do_not_fit_are_refused(group_size: int) -> None:
    with pytest.raises(LyapunovPruneError, match=f"groups of {group_size}.*4"):
        round_to_nearest(torch.ones(2, 4), 4, group_size)


@settings(max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.sampled_from([None, 1, 4, 8]),
    st.integers(2, 8),
    st.floats(-3, 3),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_symmetric_grids_hold_what_can_be_stored(
    seed: int, m: int, group_size: int | None, bits: int, shift: float, dtype: torch.dtype
) -> None:
    W = (torch.randn(m, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift).to(dtype)
    q, scale = symmetric_grid(W, bits, group_size)
    assert (q.dtype, scale.dtype) == (torch.int8, dtype)
    width = group_size or 16
    assert scale.shape == (m, 16 // width)
    half = 2 ** (bits - 1)
    steps = scale.double().numpy().reshape(-1)
    codes, before = (x.double().numpy().reshape(-1, width) for x in (q, W))
    for step, code, values in zip(steps, codes, before, strict=True):
        exact = 2 * np.abs(values).max() / (2**bits - 1)
        # rounded up, by one unit of the dtype at the most
        unit = torch.finfo(dtype).eps * max(2 * exact, torch.finfo(dtype).tiny)  # subnormal numbers are evenly spaced
        assert exact <= step <= exact + unit or exact == 0
        grid = step * np.arange(-half, half)
        np.testing.assert_allclose(np.abs(values - step * code), np.abs(values[:, None] - grid).min(1), atol=1e-12)
        assert np.abs(values - step * code).max() <= step / 2 * (1 + 1e-12)
        assert ((-half <= code) & (code < half)).all()
    stored = (codes * steps[:, None]).reshape(m, 16)
    assert torch.equal(round_to_nearest(W, bits, group_size, symmetric=True), torch.from_numpy(stored).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_integers_times_scale_in_the_dtype_are_the_weights(dtype: torch.dtype) -> None:
    """What whoever unpacks computes: one product, rounded once."""
    W = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    for bits in (4, 8):
        q, scale = grid = symmetric_grid(W, bits, 8)
        product = (q.to(dtype).view(64, 4, 8) * scale.unsqueeze(-1)).view(64, 32)
        assert torch.equal(product, grid.values())


def test_a_row_of_zeros_has_a_symmetric_grid() -> None:
    q, scale = symmetric_grid(torch.tensor([[0.0, -0.0], [-7.5, 7.5]]), 4)
    assert q.tolist() == [[0, 0], [-8, 7]]
    assert scale.tolist() == [[1.0], [1.0]]
    with pytest.raises(LyapunovPruneError, match=r"groups of 3 .*4 inputs"):
        symmetric_grid(torch.ones(2, 4), 4, 3)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
def test_at_1_58_bits_there_are_three_values_a_group(group_size: int | None, symmetric: bool) -> None:
    """`s · clip(round(w / s), −1, 1)` with `s = mean |w|`, as BitNet b1.58 has it."""
    W = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W[0] = 0
    found = RoundToNearest(group_size, symmetric)(W, 1.58)
    for before, after in zip(W.view(-1, group_size or 12).numpy(), found.view(-1, group_size or 12), strict=True):
        scale = np.abs(before).mean() or 1.0
        np.testing.assert_allclose(after, scale * np.clip(np.round(before / scale), -1, 1), atol=1e-12)
        assert len(after.unique()) <= 3


@pytest.mark.parametrize("bits", [-4, 0, 1, 1.5, 1.6, 2.5, 9])
def test_other_bits_are_refused(bits: float) -> None:
    with pytest.raises(LyapunovPruneError, match=rf"{bits:g}.*1\.58"):
        RoundToNearest()(torch.randn(2, 4), bits)
