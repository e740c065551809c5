"""Every form of a map against the optimum found without the sums, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.mending.fit import FORMS, LOW_RANK, LinearMap, Sums, fit

WIDTH, TOKENS = 12, 60


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m and r (tokens × width) that have something in common, and weights."""
    g = torch.Generator().manual_seed(seed)
    m, noise, A = (
        torch.randn(*shape, generator=g).double() for shape in ((TOKENS, WIDTH), (TOKENS, WIDTH), (WIDTH,) * 2)
    )
    return m + 0.5, m @ A.T + noise + 2, torch.rand(TOKENS, generator=g).double() + 0.1


def summed(m: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Sums:
    groups = Sums(WIDTH, m.device), Sums(WIDTH, m.device)
    for sums, parts in zip(groups, ((slice(0, 17), slice(17, 20)), (slice(20, TOKENS),)), strict=True):
        for part in parts:  # as windows come
            sums.add(m[part], r[part], w[part])
    return groups[0] + groups[1]


def cost(found: LinearMap, m: torch.Tensor, r: torch.Tensor, w: torch.Tensor, ridge: float, *, shifts: bool) -> float:
    """What `fit` minimises."""
    error = (w * (found(m) - m - r).square().sum(-1)).sum()
    centre = (w.unsqueeze(-1) * m).sum(0) / w.sum() if shifts else 0
    mean = (w.unsqueeze(-1) * (m - centre).square()).sum(0).mean()
    return float(error + ridge * mean * found.E.square().sum())


@pytest.mark.parametrize("shifts", [False, True])
@settings(max_examples=10)
@given(seed=st.integers(0, 1000), ridge=st.sampled_from([0.01, 0.5]))
def test_the_full_map_is_that_of_least_squares(shifts: bool, seed: int, ridge: float) -> None:
    m, r, w = drawn(seed)
    found = fit("full", summed(m, r, w), ridge, shifts=shifts)
    centre = (w.unsqueeze(-1) * m).sum(0) / w.sum() if shifts else torch.zeros(WIDTH).double()
    scale = (ridge * (w.unsqueeze(-1) * (m - centre).square()).sum(0).mean()).sqrt()
    columns = [m] if not shifts else [m, torch.ones(TOKENS, 1)]
    rows = torch.cat([w.sqrt().unsqueeze(-1) * torch.cat(columns, 1), torch.zeros(WIDTH, m.shape[1] + shifts)])
    rows[TOKENS:, :WIDTH] = scale * torch.eye(WIDTH).double()
    wanted = torch.cat([w.sqrt().unsqueeze(-1) * r, torch.zeros(WIDTH, WIDTH)])
    solved = np.linalg.lstsq(rows.numpy(), wanted.numpy(), rcond=None)[0]
    np.testing.assert_allclose(found.E, solved[:WIDTH].T, atol=1e-9)
    assert (found.shift is not None) is shifts
    if found.shift is not None:
        np.testing.assert_allclose(found.shift, solved[WIDTH], atol=1e-9)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_no_map_of_the_form_near_it_costs_less(form: str, shifts: bool) -> None:
    m, r, w = drawn(1)
    ridge = 0.1
    found = fit(form, summed(m, r, w), ridge, shifts=shifts)
    least = cost(found, m, r, w, ridge, shifts=shifts)
    for seed in range(20):
        move = 1e-3 * torch.randn(found.E.shape, generator=torch.Generator().manual_seed(seed)).double()
        if form == "low rank":  # stays of its rank where it is turned
            U, S, V = torch.linalg.svd(found.E)
            k = max(1, WIDTH // LOW_RANK)
            assert bool((S[k:] < 1e-9 * S[0]).all())
            near = (U[:, :k] + move[:, :k]) @ torch.diag(S[:k]) @ (V[:k] + move[:k])
        else:
            near = found.E + (0 if form == "shift" else move)
        shift = None if found.shift is None else found.shift + 1e-3 * torch.randn(WIDTH).double()
        assert cost(LinearMap(near, shift), m, r, w, ridge, shifts=shifts) >= least * (1 - 1e-12)


def test_a_low_rank_is_an_eighth_of_the_width() -> None:
    generator = torch.Generator().manual_seed(0)
    m, r = torch.randn(2, 200, 56, generator=generator).double()
    sums = Sums(56, torch.device("cpu"))
    sums.add(m, r, torch.ones(200).double())
    assert torch.linalg.matrix_rank(fit("low rank", sums, 0.01, shifts=False).E) == 7


def test_forms_that_can_do_more_cost_less() -> None:
    m, r, w = drawn(2)
    sums = summed(m, r, w)
    costs = {form: cost(fit(form, sums, 0.01, shifts=True), m, r, w, 0.01, shifts=True) for form in FORMS}
    assert costs["full"] < costs["low rank"] < costs["shift"]
    assert costs["full"] < costs["channels"] < costs["shift"]


def test_a_token_of_no_weight_counts_nothing() -> None:
    m, r, w = drawn(3)
    heavy, light = m.clone(), w.clone()
    heavy[5], light[5] = 1e6, 0.0
    one, other = (fit("full", summed(x, r, light), 0.1, shifts=False) for x in (m, heavy))
    np.testing.assert_allclose(one.E, other.E, atol=1e-10)


def test_a_map_is_applied_in_float64_and_rounded_once() -> None:
    m, r, w = drawn(4)
    for form in FORMS:
        found = fit(form, summed(m, r, w), 0.1, shifts=True)
        whole = torch.eye(WIDTH) + (found.E.diag() if found.E.ndim == 1 else found.E)
        assert found.shift is not None
        wanted = m @ whole.double().T + found.shift
        np.testing.assert_allclose(found(m), wanted, atol=1e-12)
        assert found(m.float()).dtype == torch.float32


def test_nothing_that_reached_the_place_is_said() -> None:
    m, r, w = drawn(5)
    with pytest.raises(LyapunovPruneError, match="no nonzero input"):
        fit("full", summed(torch.zeros_like(m), r, w), 0.1, shifts=False)
