"""Schedules from the contraction profile: optimality, equal shares, and profiles that do not serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from helpers import LAYERS, RHO, make_tiny, profile_of, with_energies
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, allocate
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.allocation.amplification import log_amplification, tolerance
from lyapunov_prune.allocation.schedule import SPARSEST
from lyapunov_prune.allocation.schedules.bits import Bits
from lyapunov_prune.allocation.schedules.lyapunov import Lyapunov
from lyapunov_prune.allocation.schedules.lyapunov_budget import LyapunovBudget
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.profiles import ContractionProfile


def lyapunov(model: PreTrainedModel, budget: float, given: Any, **options: Any) -> Allocation:
    return Lyapunov(**options).allocate(model, budget, given)


def lyapunov_budget(model: PreTrainedModel, budget: float, given: Any, **options: Any) -> Allocation:
    return LyapunovBudget(**options).allocate(model, budget, given)


def allocate_bits(model: PreTrainedModel, budget: float, given: Any, **options: Any) -> Allocation:
    return Bits(**options).allocate(model, budget, given)


@pytest.fixture(scope="module")
def profile(llama: PreTrainedModel) -> ContractionProfile:
    return profile_of(llama)


def test_the_amplification_is_the_product_of_what_follows(profile: ContractionProfile) -> None:
    wanted = [np.prod(RHO[layer + 1 :]) for layer in range(LAYERS)]
    np.testing.assert_allclose(np.exp(log_amplification(profile)), wanted, rtol=1e-12)
    np.testing.assert_allclose(profile.downstream_amplification, wanted, rtol=1e-12)


def test_every_layer_adds_the_same_error_at_the_output(profile: ContractionProfile) -> None:
    share = tolerance(profile)
    np.testing.assert_allclose(share.sum(), 1, rtol=1e-14)
    np.testing.assert_allclose(share * np.exp(log_amplification(profile)), share[-1], rtol=1e-12)


@settings(max_examples=25)
@given(rho=st.lists(st.floats(0.05, 0.99), min_size=12, max_size=12))
def test_where_every_layer_contracts_the_readings_favour_opposite_ends(
    gpt2_like: ContractionProfile, rho: list[float]
) -> None:
    own = with_energies(gpt2_like, np.cumprod([1e-4, *rho]))
    downstream, equal = tolerance(own, "downstream"), tolerance(own)
    np.testing.assert_allclose(downstream, own.downstream_amplification / own.downstream_amplification.sum())
    assert downstream[8:].sum() > 1 / 3 > equal[8:].sum()
    np.testing.assert_allclose(downstream * equal, (downstream * equal)[0], rtol=1e-9)


@pytest.fixture(scope="module")
def gpt2_like() -> ContractionProfile:
    """Twelve layers that contract, the first most and the late ones more than the middle, as the paper's Figure 5 says
    of GPT-2 Small."""
    rho = [0.3, 0.96, 0.95, 0.94, 0.93, 0.9, 0.87, 0.85, 0.84, 0.83, 0.82, 0.8]
    return profile_of(make_tiny("llama", num_hidden_layers=12), rho)


def test_the_paper_s_shares_are_those_of_the_downstream_reading(gpt2_like: ContractionProfile) -> None:
    """54 % in the last third and 19 % in the first (structural sensitivity, §6.4)."""
    share = tolerance(gpt2_like, "downstream")
    np.testing.assert_allclose([share[8:].sum(), share[:4].sum()], [0.54, 0.19], atol=0.01)
    share = tolerance(gpt2_like, "equal-error")
    assert share[8:].sum() < 1 / 3 < share[:4].sum()


def test_an_unknown_reading_is_refused(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    for call in (lambda: tolerance(profile, "paper"), lambda: lyapunov_budget(llama, 0.5, profile, reading="paper")):  # type: ignore[arg-type]
        with pytest.raises(LyapunovPruneError, match=r"reading .*'paper'"):
            call()


def test_the_schedule_follows_the_reading_and_the_pooling(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    found = allocate(llama, "lyapunov-budget", 0.4, profile=profile, reading="downstream")
    s = found.by_layer()
    np.testing.assert_allclose(s**2 / tolerance(profile, "downstream"), (s**2 / tolerance(profile, "downstream"))[0])
    assert "reading downstream, rho under energy pooling" in found.headline()
    energies = {"energy": profile.relative_energy, "token": np.cumprod([1e-4, 1, 1, 2, 2, 1, 1])}
    both = dataclasses.replace(profile, energies=energies)
    for schedule, budget in (("lyapunov", 0.4), ("lyapunov-budget", 0.4), ("bits", 6.0)):
        poolings = [allocate(llama, schedule, budget, profile=both.pooled(p)) for p in ("energy", "token")]
        assert [a.pooling for a in poolings] == ["energy", "token"]
        assert (poolings[0].amount != poolings[1].amount).any()
    np.testing.assert_allclose(log_amplification(both.pooled("token")), np.log([4, 4, 2, 1, 1, 1]), atol=1e-12)


def test_products_beyond_the_range_of_a_float_are_kept(profile: ContractionProfile) -> None:
    wide = with_energies(profile, 10.0 ** np.array([-150, 150, -150, 150, -150, 0, 0]))
    wanted = np.log(10) * np.array([-150, 150, -150, 150, 0, 0])
    np.testing.assert_allclose(log_amplification(wide), wanted, rtol=1e-12)
    assert np.isfinite(tolerance(wide)).all()


def weights(model: PreTrainedModel) -> tuple[np.ndarray, np.ndarray]:
    """Σ‖W‖_F² and entries of every layer."""
    found = np.zeros((2, LAYERS))
    for p in find_projections(wrap(model)):
        W = p.weight(model).double().numpy()
        found[:, p.layer] += (W**2).sum(), W.size
    return found[0], found[1]


@pytest.mark.parametrize(("least", "most"), [(0.8, 1.2), (0.0, 1e6), (0.5, 1.1)])
def test_no_other_schedule_has_less_error(least: float, most: float) -> None:
    """Against scipy, on layers of unequal weights and, for the widths of one MLP, unequal size."""
    model = make_tiny("llama")
    with torch.no_grad():
        for p in find_projections(wrap(model)):
            p.weight(model).mul_(1 + p.layer / 4)
    mlp = model.get_submodule("model.layers.4.mlp")
    for name, shape in (("gate_proj", (32, 80)), ("up_proj", (32, 80)), ("down_proj", (80, 32))):
        setattr(mlp, name, torch.nn.Linear(*shape, bias=False))
    profile = profile_of(model)
    w, n = weights(model)
    cost = w * np.exp(log_amplification(profile))
    high = min(most * 0.5, SPARSEST)
    found = lyapunov(model, 0.5, profile, least=least, most=most)
    best = scipy.optimize.minimize(
        lambda s: (cost * s**2).sum() / cost.mean(),
        np.full(LAYERS, 0.5),
        jac=lambda s: 2 * cost * s / cost.mean(),
        bounds=[(least * 0.5, high)] * LAYERS,
        constraints={"type": "eq", "fun": lambda s: (n @ s) / n.sum() - 0.5, "jac": lambda s: n / n.sum()},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert best.success
    np.testing.assert_allclose(found.by_layer(), best.x, atol=1e-5)
    assert abs(found.mean - 0.5) <= 1e-12


def test_a_layer_whose_errors_grow_more_stays_denser(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    A = log_amplification(profile)
    for found in (lyapunov(llama, 0.5, profile, least=0, most=9), lyapunov_budget(llama, 0.5, profile)):
        s = found.by_layer()
        assert (np.diff(s[np.argsort(A, kind="stable")]) <= 0.02).all()  # weights differ a little
        assert s[A.argmin()] == s.max()


@settings(max_examples=30)
@given(rho=st.lists(st.floats(0.05, 20), min_size=LAYERS, max_size=LAYERS), budget=st.floats(0, 0.98))
def test_the_budget_follows_the_root_of_the_tolerance(
    llama: PreTrainedModel, profile: ContractionProfile, rho: list[float], budget: float
) -> None:
    own = with_energies(profile, np.cumprod([1e-4, *rho]))
    s = lyapunov_budget(llama, budget, own).by_layer()
    assert abs(s.mean() - budget) <= 1e-12
    free = s < SPARSEST - 1e-9
    error = s[free] ** 2 / tolerance(own)[free]
    least = np.finfo(float).tiny  # below it the square of a budget has few digits left
    np.testing.assert_allclose(error, error[0] if len(error) else 0, rtol=1e-8, atol=least)


def test_a_factor_that_is_none_is_named(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    energies = profile.relative_energy.copy()
    energies[3] = 0
    broken = with_energies(profile, energies)
    for call in (tolerance, lambda p: lyapunov(llama, 0.5, p), lambda p: lyapunov_budget(llama, 0.5, p)):
        with pytest.raises(LyapunovPruneError, match="rho of layer 2 is 0"):
            call(broken)


def test_a_profile_of_another_model_is_refused(profile: ContractionProfile) -> None:
    other = make_tiny("llama", seed=1)
    for schedule in (lyapunov, lyapunov_budget):
        with pytest.raises(LyapunovPruneError, match="contraction profile"):
            schedule(other, 0.5, profile)


def test_amplifications_too_far_apart_are_refused(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    far = with_energies(profile, 10.0 ** np.array([0, -150, 150, 0, 0, 0, 0]))
    assert lyapunov_budget(llama, 0.1, far).mean == pytest.approx(0.1, abs=1e-12)
    with pytest.raises(LyapunovPruneError, match="too far apart"):
        lyapunov(llama, 0.5, far)


def test_weights_of_nothing_and_bounds_without_the_budget_are_refused(profile: ContractionProfile) -> None:
    model = make_tiny("llama")
    with pytest.raises(LyapunovPruneError, match=r"least .*1\.1"):
        lyapunov(model, 0.5, profile, least=1.1)
    with torch.no_grad():
        for p in find_projections(wrap(model)):
            if p.layer == 3:
                p.weight(model).zero_()
    with pytest.raises(LyapunovPruneError, match=r"layer 3.*zero"):
        lyapunov(model, 0.5, profile_of(model))


def test_the_matrices_of_a_layer_are_alike(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    found = lyapunov_budget(llama, 0.3, profile)
    for name, layer in zip(found.names, found.layers, strict=True):
        assert f"layers.{layer}." in name
        assert found.of(name) == pytest.approx(found.by_layer()[layer], rel=1e-14)


def test_a_profile_of_noise_allocates_nothing(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    noise = dataclasses.replace(profile, floor=profile.energies["energy"])
    for schedule in (lyapunov, lyapunov_budget):
        with pytest.raises(LyapunovPruneError, match=r"rho.*floor of float32.*atp"):
            schedule(llama, 0.5, noise)
    with pytest.raises(LyapunovPruneError, match="every rho"):
        allocate_bits(llama, 4.0, noise)


def test_layers_below_the_floor_are_told(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    floor = np.append(profile.energies["energy"][:2], np.zeros(LAYERS - 1))
    some = dataclasses.replace(profile, floor=floor)
    for found in (lyapunov(llama, 0.5, some), lyapunov_budget(llama, 0.5, some), allocate_bits(llama, 4.0, some)):
        assert found.below_floor == (0, 1)
        assert found.headline().endswith("; rho lies below the rounding floor at layer 0, 1")
        np.testing.assert_array_equal(
            found.amount, allocate(llama, found.schedule, found.budget, profile=profile).amount
        )
