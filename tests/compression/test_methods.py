"""Every method against every part of the contract that they share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import FIELDS, Method, rank_for
from lyapunov_prune.compression.methods.rtn import RoundToNearest
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError

SHAPE = (12, 16)
AMOUNTS = {"sparsity": 0.4, "rank": 5, "bits": 3}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def sample(seed: int = 0) -> tuple[torch.Tensor, Statistics]:
    g = torch.Generator().manual_seed(seed)
    (m, n), tokens = SHAPE, 50
    X = torch.randn(n, n, generator=g, dtype=torch.float64) @ torch.randn(n, tokens, generator=g, dtype=torch.float64)
    G = torch.randn(m, tokens, generator=g, dtype=torch.float64)
    W = torch.randn(m, n, generator=g, dtype=torch.float64)
    return W, Statistics(X.norm(dim=1), X @ X.T, G @ G.T, magnitudes=X.abs().sum(1))


def compressed(
    name: str, W: torch.Tensor, statistics: Statistics | None, amount: float, **options: Any
) -> torch.Tensor:
    return METHODS.make(name, **options)(W, amount, statistics)


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return request.param


OFF_GRID = ("awq",)  # rounds a matrix of scaled columns, so that a row has as many values as columns


def kept(found: torch.Tensor, kind: str, removed: torch.Tensor | None) -> bool:
    """Whether a matrix has the rank, or the number of levels, or the zeros that AMOUNTS asks for."""
    if kind == "rank":
        # Beyond the rank only the rounding to the dtype is left.
        tail = torch.linalg.svdvals(found.double())[int(AMOUNTS["rank"]) :]
        return float(tail.max()) <= torch.finfo(found.dtype).eps * float(torch.linalg.matrix_norm(found.double()))
    if kind == "bits":
        return max(len(row.unique()) for row in found) <= 2 ** AMOUNTS["bits"]
    assert removed is not None
    return not bool(found[removed].any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_form_is_kept_and_the_amount_reached(method: str, dtype: torch.dtype) -> None:
    W, statistics = sample()
    W, kind = W.to(dtype), METHODS[method].unit
    before, fields = W.clone(), [t.clone() for t in (statistics.norms, statistics.gram, statistics.sensitivity)]
    found = compressed(method, W, statistics, AMOUNTS[kind])
    assert (found.shape, found.dtype, found.device) == (W.shape, W.dtype, W.device)
    assert torch.equal(W, before)
    for old, new in zip(fields, (statistics.norms, statistics.gram, statistics.sensitivity), strict=True):
        assert torch.equal(old, new)
    assert not torch.equal(found, W)
    # In float64 nothing rounds to zero by itself: there the zeros are what was removed.
    removed = compressed(method, W.double(), statistics, AMOUNTS[kind]) == 0 if kind == "sparsity" else None
    if removed is not None:
        m, n = SHAPE
        assert int(removed.sum()) == (m * round(0.4 * n) if method in ("wanda", "weight-only") else round(0.4 * m * n))
    assert method in OFF_GRID or kept(found, kind, removed)


def test_planted_fault_an_amount_not_reached_is_seen(method: str) -> None:
    W, statistics = sample()
    kind = METHODS[method].unit
    removed = compressed(method, W, statistics, AMOUNTS[kind]) == 0 if kind == "sparsity" else None
    less = {"sparsity": 0.3, "rank": 6, "bits": 4}[kind]
    assert not kept(compressed(method, W, statistics, less), kind, removed)
    assert [name for name in METHODS if getattr(METHODS[name], "on_grid", True) is False] == [*OFF_GRID]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_amount_that_asks_for_nothing_changes_nothing(method: str, dtype: torch.dtype) -> None:
    W, statistics = sample()
    W, kind = W.to(dtype), METHODS[method].unit
    if kind == "bits":  # a matrix that is on its grid stays
        W = torch.arange(192).view(SHAPE).to(dtype).remainder(16) - 5
        assert torch.equal(compressed(method, W, statistics, 4), W)
        return
    for nothing in [0.0, 1e-4] if kind == "sparsity" else [12, 13, 1000]:
        assert torch.equal(compressed(method, W, statistics, nothing), W)


def test_a_parameter_gives_a_plain_tensor(method: str) -> None:
    W, statistics = sample()
    found = compressed(method, torch.nn.Parameter(W), statistics, AMOUNTS[METHODS[method].unit])
    assert not found.requires_grad
    assert torch.equal(found, compressed(method, W, statistics, AMOUNTS[METHODS[method].unit]))


def test_a_matrix_that_lies_the_other_way_gives_the_same(method: str) -> None:
    """GPT-2 stores its matrices transposed."""
    W, statistics = sample()
    amount = AMOUNTS[METHODS[method].unit]
    found = compressed(method, W.T.contiguous().T, statistics, amount)
    torch.testing.assert_close(found, compressed(method, W, statistics, amount), rtol=0, atol=1e-10)


def test_options_reach_the_methods_that_have_them(method: str) -> None:
    W, statistics = sample()
    kind = METHODS[method].unit
    if kind == "sparsity":
        found = compressed(method, W, statistics, 0.5, pattern=(2, 4))
        assert ((found == 0).view(-1, 4).sum(1) == 2).all()
        with pytest.raises(LyapunovPruneError, match=r"2:4 has sparsity 0\.5, not 0\.4"):
            compressed(method, W, statistics, 0.4, pattern=(2, 4))
    else:
        with pytest.raises(LyapunovPruneError, match=f"{method} .*pattern"):
            compressed(method, W, statistics, AMOUNTS[kind], pattern=(2, 4))
    if kind == "bits":
        found = compressed(method, W, statistics, 2, group_size=8)
        assert max(len(row.unique()) for row in found) > 4
        around = compressed(method, W, statistics, 2, group_size=8, symmetric=True)
        assert not torch.equal(around, found)
        if method not in OFF_GRID:
            assert max(len(group.unique()) for group in found.view(-1, 8)) <= 4
            assert torch.equal(RoundToNearest(8, symmetric=True).steps(W, 2).nearest(around), around)
    else:
        with pytest.raises(LyapunovPruneError, match=f"{method} .*group_size"):
            compressed(method, W, statistics, AMOUNTS[kind], group_size=8)
        with pytest.raises(LyapunovPruneError, match=f"{method} .*symmetric"):
            compressed(method, W, statistics, AMOUNTS[kind], symmetric=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(method: str, bad: float) -> None:
    W, statistics = sample()
    W[3, 5] = bad
    with pytest.raises(LyapunovPruneError, match="NaN or infinity"):
        compressed(method, W, statistics, AMOUNTS[METHODS[method].unit])


NEEDED = [(name, field) for name, m in METHODS.items() for field in FIELDS[m.needs]]


@pytest.mark.parametrize(("method", "field"), NEEDED, ids=str)
def test_statistics_that_are_missing_or_not_finite_are_refused(method: str, field: str) -> None:
    W, statistics = sample()
    amount = AMOUNTS[METHODS[method].unit]
    with pytest.raises(LyapunovPruneError, match=f"{method}.*statistics"):
        compressed(method, W, None, amount)
    without: dict[str, Any] = {field: None}
    with pytest.raises(LyapunovPruneError, match=f"{method}.*{field}"):
        compressed(method, W, dataclasses.replace(statistics, **without), amount)
    getattr(statistics, field).view(-1)[7] = math.nan
    with pytest.raises(LyapunovPruneError, match=rf"NaN .*{field}"):
        compressed(method, W, statistics, amount)


def test_what_a_method_does_not_need_is_not_asked_for(method: str) -> None:
    W, statistics = sample()
    unneeded = {f: None for f in ("gram", "sensitivity") if f not in FIELDS[METHODS[method].needs]}
    bare = dataclasses.replace(statistics, **unneeded)
    amount = AMOUNTS[METHODS[method].unit]
    assert torch.equal(compressed(method, W, bare, amount), compressed(method, W, statistics, amount))
    if METHODS[method].needs == "nothing":
        assert torch.equal(compressed(method, W, None, amount), compressed(method, W, statistics, amount))


@pytest.mark.parametrize("amount", [-0.1, 1.1, 2.5, 0.5, 0, 9, math.nan, math.inf, -math.inf])
def test_amounts_out_of_range_are_refused(method: str, amount: float) -> None:
    W, statistics = sample()
    fits = {"sparsity": 0 <= amount <= 1, "rank": amount == 9, "bits": False}[METHODS[method].unit]
    if fits:
        compressed(method, W, statistics, amount)
    else:
        with pytest.raises(LyapunovPruneError, match=f"{method} cannot take {METHODS[method].unit} .*; give "):
            compressed(method, W, statistics, amount)


def test_statistics_of_another_matrix_are_refused(method: str) -> None:
    W, statistics = sample()
    if METHODS[method].needs != "nothing":
        with pytest.raises(LyapunovPruneError, match="of 15 features have shape"):
            compressed(method, W[:, :15], statistics, AMOUNTS[METHODS[method].unit])


def test_what_is_no_matrix_and_no_method_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="unknown method 'prune'"):
        compressed("prune", torch.ones(2, 2), None, 0.5)
    for W in (torch.ones(4), torch.ones(2, 2, 2), torch.ones(2, 2, dtype=torch.int8)):
        with pytest.raises(LyapunovPruneError, match="real matrix"):
            compressed("magnitude", W, None, 0.5)


def test_every_method_says_what_it_needs_in_words_that_are_known() -> None:
    for method in METHODS.values():
        assert issubclass(method, Method)
        assert method.needs in FIELDS
        assert method.unit in AMOUNTS


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 100))
def test_the_rank_is_the_largest_that_is_small_enough(m: int, n: int, percent: int) -> None:
    """In whole numbers: 100 r (m + n) ≤ (100 − percent) m n."""
    wanted = (100 - percent) * m * n // (100 * (m + n))
    if m + n >= m * n:
        assert rank_for((m, n), percent / 100) is None
    elif wanted:
        assert rank_for((m, n), percent / 100) == wanted
    else:
        with pytest.raises(LyapunovPruneError, match=f"{m} × {n} matrix"):
            rank_for((m, n), percent / 100)


def test_a_rank_of_zero_is_refused_with_what_is_possible() -> None:
    with pytest.raises(LyapunovPruneError, match=r"at most 0\.9687$"):
        rank_for((64, 64), 0.99)
    assert rank_for((64, 64), 0.9687) == 1
    assert rank_for((20, 20), 0.9) == 1  # (1 − 0.9) · 400 / 40 is below 1 in float64
    assert rank_for((1, 64), 0.0) is None
    with pytest.raises(LyapunovPruneError, match=r"cannot take sparsity 1\.5"):
        rank_for((64, 64), 1.5)
