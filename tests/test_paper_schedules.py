"""The schedules of the papers: formulas and optima against references in float64, and what each refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from helpers import LAYERS, RHO, captured, make_tiny, profile_of, with_energies
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from experiments.schedules import (
    alpha_pruning,
    atp_search,
    guidelines,
    hill,
    log_amplification,
    lyapunov,
    lyapunov_budget,
    owl,
    wide_where_amplified,
)
from lyapunov_prune import LyapunovPruneError, allocate, compress
from lyapunov_prune.allocation.schedule import SPARSEST
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.profiles import ContractionProfile
from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity


@pytest.fixture(scope="module")
def profile(llama: PreTrainedModel) -> ContractionProfile:
    return profile_of(llama)


@pytest.fixture
def batch(ids: torch.Tensor) -> TokenBatch:
    return TokenBatch(ids, text="few", split="calibration", bos=None)


def outlier_shares(model: PreTrainedModel, ids: torch.Tensor, outlier: float) -> np.ndarray:
    """All scores of a layer in one heap, and the share above `outlier` times their mean."""
    norms = captured(model, ids)
    heaps: dict[int, list[np.ndarray]] = {}
    for p in find_projections(wrap(model)):
        heaps.setdefault(p.layer, []).append((np.abs(p.weight(model).double().numpy()) * norms[p.module]).ravel())
    found = [np.concatenate(heaps[layer]) for layer in sorted(heaps)]
    return np.array([float((heap > outlier * heap.mean()).mean()) for heap in found])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_owl_is_denser_where_more_scores_of_the_layer_are_outliers(name: str, batch: TokenBatch) -> None:
    model = make_tiny(name)
    D = outlier_shares(model, batch.ids, 2.0)
    found = owl(model, 0.5, batch, outlier=2.0, width=0.1)
    s, place = found.by_layer(), (D - D.min()) / np.ptp(D)
    np.testing.assert_allclose(s, 0.5 - 0.2 * (place - place.mean()), atol=5e-3)
    np.testing.assert_allclose(np.ptp(s), 0.2)
    assert (np.argsort(s) == np.argsort(-D)).all()
    assert found.measured_on[0].tokens == batch.ids.numel()
    np.testing.assert_allclose(owl(model, 0.5, batch, outlier=1e9).amount, 0.5, rtol=1e-12)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 6.0])
def test_samples_of_a_power_law_give_its_exponent(alpha: float) -> None:
    """A density ∝ λ^−α is a Pareto law of index α − 1; the estimate of 1 / (α − 1) spreads as 1 / √k."""
    samples = scipy.stats.pareto(alpha - 1).rvs(40_000, random_state=0)
    np.testing.assert_allclose(hill(samples) - 1, alpha - 1, rtol=4 / math.sqrt(20_000))
    for bad in ([0.0, 0.0, 1.0, 2.0], [2.0, 2.0, 2.0], [1.0, math.inf]):
        with pytest.raises(LyapunovPruneError):
            hill(np.array(bad))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_alpha_pruning_is_sparser_where_tails_are_lighter(name: str) -> None:
    """By the eigenvalues of the smaller Gram matrix, by numpy."""
    model = make_tiny(name)
    tails: dict[int, list[float]] = {}
    for p in find_projections(wrap(model)):
        W = p.weight(model).double().numpy()
        W = W if W.shape[0] <= W.shape[1] else W.T
        down = np.linalg.eigvalsh(W @ W.T)[::-1]
        k = len(down) // 2
        tails.setdefault(p.layer, []).append(1 + k / sum(math.log(down[i] / down[k]) for i in range(k)))
    alpha = np.array([np.mean(tails[layer]) for layer in sorted(tails)])
    shape = 0.8 + 0.4 * (alpha - alpha.min()) / np.ptp(alpha)
    found = alpha_pruning(model, 0.5, tau=0.2)
    np.testing.assert_allclose(found.by_layer(), 0.5 * shape / shape.mean(), rtol=1e-6)


# What enters the MLP, and the keys and values, by the ends of their names.
ENDS = {
    "llama": (("gate_proj", "up_proj"), ("k_proj", "v_proj")),
    "gpt2": (("c_fc",), tuple(f":{part}{head}" for part in "kv" for head in range(4))),
    "phi3": (("gate_up_proj:gate", "gate_up_proj:up"), (":k", ":v")),
}


@pytest.mark.parametrize("name", list(ENDS))
def test_the_guidelines_hold(name: str) -> None:
    found = guidelines(make_tiny(name), 0.5, ceiling=0.8, extra=0.15)
    entering, first = ENDS[name]
    rest: set[float] = set()
    keys: set[float] = set()
    for matrix, layer, amount in zip(found.names, found.layers, found.amount, strict=True):
        if matrix.endswith(entering) and layer < 2:
            assert amount == 0
        else:
            (keys if matrix.endswith(first) else rest).add(amount)
    assert len(keys) == len(rest) == 1
    assert max(keys) == pytest.approx(min(max(rest) + 0.15, 0.8), rel=1e-14)
    assert abs(found.mean - 0.5) <= 1e-12


def test_the_measured_threshold_is_the_ceiling_of_the_guidelines(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    measured = measure_sensitivity(llama, ids[1:, :16], studies=["removal"], sparsity=0.5)
    with pytest.raises(LyapunovPruneError, match=r"no s\*"):
        guidelines(llama, 0.5, ceiling=measured)
    with pytest.raises(LyapunovPruneError, match="reaches 0 to"):
        guidelines(llama, 0.69, ceiling=0.7)


def test_no_other_schedule_has_less_error() -> None:
    """Against scipy, on layers of unequal weights and, for the widths of one MLP, unequal size."""
    model = make_tiny("llama")
    with torch.no_grad():
        for p in find_projections(wrap(model)):
            p.weight(model).mul_(1 + p.layer / 4)
    mlp = model.get_submodule("model.layers.4.mlp")
    for name, shape in (("gate_proj", (32, 80)), ("up_proj", (32, 80)), ("down_proj", (80, 32))):
        setattr(mlp, name, torch.nn.Linear(*shape, bias=False))
    profile = profile_of(model)
    w, n = np.zeros((2, LAYERS))
    for p in find_projections(wrap(model)):
        W = p.weight(model).detach().double().numpy()
        w[p.layer], n[p.layer] = w[p.layer] + (W**2).sum(), n[p.layer] + W.size
    cost = w * [np.prod(RHO[layer + 1 :]) for layer in range(LAYERS)]
    for least, most in ((0.8, 1.2), (0.0, 1e6), (0.5, 1.1)):
        found = lyapunov(model, 0.5, profile, least=least, most=most)
        best = scipy.optimize.minimize(
            lambda s: (cost * s**2).sum() / cost.mean(),
            np.full(LAYERS, 0.5),
            jac=lambda s: 2 * cost * s / cost.mean(),
            bounds=[(least * 0.5, min(most * 0.5, SPARSEST))] * LAYERS,
            constraints={"type": "eq", "fun": lambda s: (n @ s) / n.sum() - 0.5, "jac": lambda s: n / n.sum()},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert best.success
        np.testing.assert_allclose(found.by_layer(), best.x, atol=1e-5)


@settings(max_examples=30)
@given(rho=st.lists(st.floats(0.05, 20), min_size=LAYERS, max_size=LAYERS), budget=st.floats(0, 0.98))
def test_every_layer_below_the_ceiling_adds_its_share_of_the_error(
    llama: PreTrainedModel, profile: ContractionProfile, rho: list[float], budget: float
) -> None:
    own = with_energies(profile, np.cumprod([1e-4, *rho]))
    A = np.array([np.prod(rho[layer + 1 :]) for layer in range(LAYERS)])
    np.testing.assert_allclose(np.exp(log_amplification(own)), A, rtol=1e-9)
    for reading, tolerance in (("equal-error", 1 / A), ("downstream", A)):
        s = lyapunov_budget(llama, budget, own, reading=reading).by_layer()  # type: ignore[arg-type]
        assert abs(s.mean() - budget) <= 1e-12
        error = (s**2 / tolerance)[s < SPARSEST - 1e-9]
        np.testing.assert_allclose(error, error[0] if len(error) else 0, rtol=1e-8, atol=np.finfo(float).tiny)


def test_the_layers_of_largest_amplification_are_wide(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    for count in range(LAYERS + 1):
        found = wide_where_amplified(llama, 4 + 4 * count / LAYERS, profile, low=4, high=8)
        # A = 0.5625, 1.125, 0.75, 3, 3, 1: of the two that are equal the earlier comes first.
        wide = [3, 4, 1, 5, 2, 0][:count]
        assert found.by_layer().tolist() == [8 if layer in wide else 4 for layer in range(LAYERS)]
    with pytest.raises(LyapunovPruneError, match="no mean"):
        wide_where_amplified(llama, 5.0, profile, low=4, high=8)


def test_a_profile_of_noise_allocates_nothing(llama: PreTrainedModel, profile: ContractionProfile) -> None:
    noise = dataclasses.replace(profile, floor=profile.energies["energy"])
    for schedule in (lyapunov, lyapunov_budget):
        with pytest.raises(LyapunovPruneError, match="every rho"):
            schedule(llama, 0.5, noise)
    with pytest.raises(LyapunovPruneError, match="too far apart"):
        lyapunov(llama, 0.5, with_energies(profile, 10.0 ** np.array([0, -150, 150, 0, 0, 0, 0])))


def test_the_search_scores_on_windows_that_it_does_not_calibrate_by(llama: PreTrainedModel, batch: TokenBatch) -> None:
    """Against the same trials by hand: compressed by the first half, scored on the second."""
    found = atp_search(llama, 0.6, batch, trials=3)
    half = (len(batch.ids) + 1) // 2
    seen, unseen = batch.ids[:half], batch.ids[half:]
    losses = {}
    for beta in 0.8 / (LAYERS - 1) * np.arange(1, 4) / 3:
        tried = allocate(llama, "atp", 0.6, beta=float(beta))
        with torch.no_grad():
            logits = compress(llama, seen, method="wanda", allocation=tried).model.double()(unseen).logits
        losses[beta] = -float(logits.log_softmax(-1)[:, :-1].gather(-1, unseen[:, 1:, None]).mean())
    best = min(losses, key=lambda beta: losses[beta])
    assert found.parameters == {"trials": 3, "beta": pytest.approx(best)}
    assert (found.schedule, found.measured_on[0].tokens) == ("atp-search", batch.ids.numel())
    np.testing.assert_array_equal(found.amount, allocate(llama, "atp", 0.6, beta=found.parameters["beta"]).amount)
