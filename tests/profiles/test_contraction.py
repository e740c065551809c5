"""`measure_contraction` against an independent float64 reference, and its properties."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import KINDS, LAYERS, make_tiny, moe, states_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError, measure_contraction
from lyapunov_prune.forward.rounding import Roughness
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles import contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.propagation import WindowSums, difference_sums, direction, drawn_means


def reference(
    model: PreTrainedModel, ids: torch.Tensor, epsilon: float, seeds: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """V of both poolings straight from the definition, in float64, one seed and one window at a time."""
    layers = LAYERS + 1
    error, state = np.zeros(layers), np.zeros(layers)
    relative: list[list[float]] = [[] for _ in range(layers)]
    for window in range(len(ids)):
        clean = states_of(model, ids[window : window + 1])
        for seed in seeds:
            moved = epsilon * direction(clean[0].float(), window, seed).double()
            other = states_of(model, ids[window : window + 1], moved)
            for k, (h, g) in enumerate(zip(clean, other, strict=True)):
                e2, h2 = (g - h).square().sum(-1), h.square().sum(-1)
                error[k] += float(e2.sum())
                state[k] += float(h2.sum())
                relative[k] += (e2 / h2).flatten().tolist()
    return {"energy": error / state, "token": np.array([np.mean(r) for r in relative])}


@pytest.fixture(scope="module")
def sink() -> PreTrainedModel:
    """A tiny Llama in which one token's state dwarfs the others', as an attention sink's does."""
    model = make_tiny("llama").double()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] *= 40
    return model


@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_definition_in_float64(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name)
    profiles = [measure_contraction(model, ids, seeds=(0, 3), pooling=pooling) for pooling in ("energy", "token")]
    wanted = reference(model.double(), ids, 1e-2, (0, 3))
    for profile in profiles:
        expected = wanted[profile.pooling]
        np.testing.assert_allclose(profile.relative_energy, expected, rtol=2e-3)
        np.testing.assert_allclose(profile.rho, expected[1:] / expected[:-1], rtol=2e-3)


def test_the_two_poolings_are_told_apart_by_the_reference(sink: PreTrainedModel, ids: torch.Tensor) -> None:
    """The planted fault: token pooling under the name of energy pooling does not pass."""
    ids = ids.clone()
    ids[:, 0] = 5
    profile = measure_contraction(sink, ids, seeds=(0,))
    expected = reference(sink, ids, 1e-2, (0,))
    np.testing.assert_allclose(profile.rho, expected["energy"][1:] / expected["energy"][:-1], rtol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(profile.pooled("token").energies["token"], expected["energy"], rtol=0.05)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "opt"])
def test_jvp_is_the_limit_of_small_perturbations(name: str, ids: torch.Tensor) -> None:
    model = make_tiny(name).double()
    limit = measure_contraction(model, ids, method="jvp", seeds=(0, 1))
    # Not smaller: the norms of these models compute in float32 whatever the model's dtype.
    small = measure_contraction(model, ids, epsilon=1e-4, seeds=(0, 1))
    np.testing.assert_allclose(limit.rho, small.rho, rtol=2e-3)
    assert limit.above_floor.all()
    assert limit.linearity is None


def test_rho_is_error_growth_over_state_growth(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    profile = measure_contraction(llama, ids)
    np.testing.assert_allclose(profile.rho, profile.error_growth / profile.state_growth, rtol=1e-12)
    np.testing.assert_allclose(profile.rho.prod(), profile.relative_energy[-1] / profile.relative_energy[0])
    np.testing.assert_allclose(profile.downstream_amplification[2], profile.rho[3:].prod())
    assert profile.downstream_amplification[-1] == 1


def test_the_perturbation_has_the_asked_size(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    profile = measure_contraction(llama, ids, epsilon=0.03, pooling="token")
    np.testing.assert_allclose(profile.relative_energy[0], 0.03**2, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_the_batch_size_changes_nothing(llama: PreTrainedModel, ids: torch.Tensor, batch_size: int) -> None:
    one, many = measure_contraction(llama, ids), measure_contraction(llama, ids, batch_size=batch_size)
    np.testing.assert_allclose(one.rho, many.rho, rtol=1e-3)
    np.testing.assert_allclose(one.rho_interval, many.rho_interval, rtol=1e-3)


def test_norm_growth_is_the_quotient_of_norms(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    growth = measure_contraction(llama, ids, seeds=(0,)).norm_growth
    states = states_of(llama, ids)
    expected = torch.linalg.matrix_norm(states[-1]) / torch.linalg.matrix_norm(states[0])
    np.testing.assert_allclose(growth, expected.numpy(), rtol=1e-5)
    told = [measure_contraction(llama, some, seeds=(0,)).headline() for some in (ids, ids[:1])]
    assert ["(CV " in line for line in told] == [True, False]  # one window varies by nothing that is known


def test_the_worst_growth_takes_the_largest_of_all_windows_layer_by_layer(
    llama: PreTrainedModel, ids: torch.Tensor
) -> None:
    profile = measure_contraction(llama, ids, seeds=(0,), batch_size=2)
    norms = torch.stack([torch.linalg.matrix_norm(h) for h in states_of(llama, ids)])
    assert profile.worst_growth == pytest.approx(float((norms[1:] / norms[:-1]).amax(1).prod()), rel=1e-5)
    assert profile.worst_growth > profile.norm_growth.max()


def test_the_sink_is_seen(sink: PreTrainedModel, ids: torch.Tensor) -> None:
    ids = torch.where(ids == 5, 6, ids)
    ids[:, 0] = 5
    profile = measure_contraction(sink, ids, seeds=(0,))
    assert profile.sink_state_share[0] > 0.9
    assert ((profile.sink_state_share > 0) & (profile.sink_state_share <= 1)).all()


def test_half_precision_is_marked_as_rounding(ids: torch.Tensor) -> None:
    assert measure_contraction(make_tiny("llama"), ids).above_floor.all()
    profile = measure_contraction(make_tiny("llama").bfloat16(), ids)
    assert not profile.above_floor.any()
    assert "not well above rounding" in str(profile)
    assert "bfloat16" in str(profile)


def norms_in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A Llama whose norms stay in the dtype of the state: all that it does is float64 then."""

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(forward, module)
    return model


@pytest.mark.parametrize(("epsilon", "measured"), [(1e-2, True), (1e-5, True), (1e-7, False), (1e-9, False)])
def test_float64_is_no_finer_than_the_norms_in_it(epsilon: float, measured: bool, ids: torch.Tensor) -> None:
    """Where the floor says rounding, ρ is off; where it says measured, it is that of a model without the casts."""
    profile = measure_contraction(make_tiny("llama").double(), ids, epsilon=epsilon, seeds=(0,))
    exact = measure_contraction(norms_in_float64(make_tiny("llama").double()), ids, epsilon=epsilon, seeds=(0,))
    assert (profile.above_floor == measured).all()
    assert exact.above_floor.all()
    off = np.abs(profile.rho / exact.rho - 1).max()
    assert off < 0.01 if measured else off > 0.5
    if not measured:
        assert "not well above rounding in float64 forwards" in str(profile)
        with pytest.raises(LyapunovPruneError, match="float64"):
            profile.require_above_floor()


def test_a_family_without_casts_keeps_the_floor_of_float64(ids: torch.Tensor) -> None:
    model = make_tiny("gpt2").double()
    profile = measure_contraction(model, ids, epsilon=1e-7, seeds=(0,))
    assert profile.above_floor.all()
    limit = measure_contraction(model, ids, method="jvp", seeds=(0,))
    np.testing.assert_allclose(profile.rho, limit.rho, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_activations_are_named_by_layer(layer: int, value: float, ids: torch.Tensor) -> None:
    model = make_tiny("llama")
    with torch.no_grad():
        find_structure(model).layers[layer].mlp.down_proj.weight[0, 0] = value
    with pytest.raises(NonFiniteError, match=f"output of layer {layer} ") as caught:
        measure_contraction(model, ids)
    assert caught.value.layer == layer + 1


@pytest.mark.parametrize(("method", "epsilon"), [("difference", 1e-12), ("difference", 1e-320), ("jvp", 1e-200)])
def test_an_epsilon_that_rounding_swallows_is_refused(method: Any, epsilon: float, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=f"{epsilon:g} "):
        measure_contraction(make_tiny("llama"), ids, epsilon=epsilon, seeds=(0,), method=method)


@pytest.mark.parametrize(
    "wrong", [{"seeds": ()}, {"epsilon": 0.0}, {"batch_size": 0}, {"method": "guess"}, {"pooling": "max"}]
)
def test_bad_arguments_are_refused(llama: PreTrainedModel, ids: torch.Tensor, wrong: dict[str, Any]) -> None:
    with pytest.raises(LyapunovPruneError):
        measure_contraction(llama, ids, **wrong)


def test_one_window_and_seed_give_no_interval(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    assert np.isnan(measure_contraction(llama, ids[:1], seeds=(0,)).rho_interval).all()
    interval = measure_contraction(llama, ids, seeds=range(4)).rho_interval
    assert (interval[:, 0] <= interval[:, 1]).all()


def test_saves_and_loads(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Any) -> None:
    profile = measure_contraction(llama, ids, seeds=(0, 1))
    again = ContractionProfile.load(profile.save(tmp_path / "profile.json"))
    np.testing.assert_array_equal(again.rho, profile.rho)
    assert str(again) == str(profile)
    assert again.measured_on == profile.measured_on


@settings(max_examples=25)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 10_000))
def test_the_bootstrap_brackets_the_estimate(windows: int, seeds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, error = rng.gamma(9, size=(4, windows)), rng.gamma(9, size=(4, seeds, windows))
    sums = WindowSums(state, error, error / state[:, None], state, error)
    for pooling in ("energy", "token"):
        energy = sums.energy(pooling)
        low, high = sums.interval(pooling).T
        rho = energy[1:] / energy[:-1]
        assert ((low <= rho * 1.0001) & (rho <= high * 1.0001)).all()


def test_means_of_drawn_windows_spread_as_a_mean_does() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, (3, 50))
    means = drawn_means(values)
    assert means is not None
    np.testing.assert_allclose(means.mean(0), values.mean(1), rtol=0.01)
    np.testing.assert_allclose(means.std(0), values.std(1) / np.sqrt(50), rtol=0.15)
    assert drawn_means(values[:, :1]) is None


def test_the_bootstrap_covers() -> None:
    """Of 200 samples of 12 windows, the 95 % interval misses the truth in few."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(200):
        noise = rng.lognormal(0, 0.3, size=(2, 1, 12))
        state = np.ones((2, 12))
        low, high = WindowSums(state, noise, noise, state, noise).interval("energy")[0]
        hits += low <= 1 <= high
    assert 170 <= hits <= 199


def sharp(name: str) -> PreTrainedModel:
    """Queries and keys four times as long: attention looks at few tokens, and what it looks at turns with the state."""
    model = make_tiny(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(part in path for part in ("q_proj", "k_proj", "c_attn")):
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_derivative_in_half_precision_is_marked_where_it_is_rounding(name: str, ids: torch.Tensor) -> None:
    """By float64 of the same weights. The planted fault: a floor of zero marks nothing."""
    for make, clear in ((make_tiny, True), (sharp, False)):
        half = make(name).bfloat16()
        whole = copy.deepcopy(half).double()
        exact, found = (measure_contraction(m, ids, method="jvp", seeds=(0,)) for m in (whole, half))
        off = np.abs(np.log(found.rho / exact.rho))
        assert (found.above_floor == clear).all()
        assert off.max() < 0.02 if clear else off.max() > 0.1
        assert exact.above_floor.all()
        assert ("not well above rounding in bfloat16 forwards: use float32" in str(found)) != clear


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_where_epsilon_is_far_from_the_derivative_is_marked(name: str, ids: torch.Tensor) -> None:
    for make in (make_tiny, sharp):
        model = make(name)
        exact = measure_contraction(model, ids, method="jvp", seeds=(0,))
        found = measure_contraction(model, ids, seeds=(0,))
        off = np.abs(np.log(found.rho / exact.rho))
        assert bool(found.not_linear) == (make is sharp)
        if make is sharp:  # what reaches the layers behind the first is of this ε too
            assert off.max() > 0.1
            assert found.not_linear[0] <= off.argmax()
        assert ("10% at ε = 0.001 at layer" in str(found)) == (make is sharp)
        small = measure_contraction(model, ids, seeds=(0,), epsilon=1e-5)
        assert small.not_linear == ()


@pytest.mark.parametrize("seed", [0, 5])
def test_linearity_is_of_two_runs(seed: int, llama: PreTrainedModel, ids: torch.Tensor) -> None:
    profile = measure_contraction(llama, ids, seeds=(seed, 7))
    one, tenth = (measure_contraction(llama, ids[:1], epsilon=epsilon, seeds=(seed,)).rho for epsilon in (1e-2, 1e-3))
    assert profile.linearity is not None
    np.testing.assert_allclose(profile.linearity, one / tenth, rtol=1e-6)
    rounding = measure_contraction(make_tiny("llama").bfloat16(), ids)
    assert rounding.linearity is not None
    assert np.isnan(rounding.linearity).all()
    assert rounding.not_linear == ()


def routed(model_type: str) -> PreTrainedModel:
    """A mixture of experts that are far from each other, so that a route that flips decides ρ."""
    model = moe(model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
def test_a_route_that_flips_is_seen_on_whatever_window(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the derivative in float64, which follows the routes as they are."""
    ids = torch.randint(97, (8, 64), generator=torch.Generator().manual_seed(1))
    model = routed(model_type)
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")
    exact = measure_contraction(wide, ids, method="jvp", seeds=(0, 1))
    named: set[int] = set()
    unseen: set[int] = set()
    for epsilon in (1e-2, 1e-3, 1e-4):
        found = measure_contraction(model, ids, epsilon=epsilon, seeds=(0, 1))
        one = measure_contraction(wide, ids, epsilon=epsilon, seeds=(0, 1))
        np.testing.assert_allclose(found.rho, one.rho, rtol=0.05)  # it is no rounding: float64 jumps as far
        off = np.flatnonzero(np.abs(np.log(found.rho / exact.rho)) > 0.25)
        # What the first of them makes of the error reaches the layers behind it.
        first = {int(layer) for layer in off[:1]}
        assert first <= set(found.not_linear)
        named |= first
        with monkeypatch.context() as patch:  # the planted fault: a stretch of one window and one seed
            patch.setattr(contraction, "roughness", lambda *_: Roughness(torch.float32, False))
            unseen |= first - set(measure_contraction(model, ids, epsilon=epsilon, seeds=(0, 1)).not_linear)
    assert named
    assert unseen or model_type != "mixtral"  # of which the first window shows nothing


def test_floor_and_linearity_of_what_routes_are_of_all_windows_and_seeds() -> None:
    ids = torch.randint(97, (3, 32), generator=torch.Generator().manual_seed(2))
    model = routed("mixtral")
    found = measure_contraction(model, ids, seeds=(0, 5), batch_size=2)
    one, tenth = (measure_contraction(model, ids, epsilon=e, seeds=(0, 5)) for e in (1e-2, 1e-3))
    np.testing.assert_allclose(found.rho, one.rho, rtol=1e-5)
    assert found.linearity is not None
    np.testing.assert_allclose(found.linearity, one.rho / tenth.rho, rtol=1e-3)
    with torch.no_grad():
        unit = difference_sums(find_structure(model), ids, 0, (0,), torch.finfo(torch.float32).eps)
    np.testing.assert_allclose(found.floor, unit.energy("energy"), rtol=0.5)  # rounding itself, in batches of others
    assert found.windows is not None
    assert found.windows.error.shape == (4, 2, 3)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_derivative_of_experts_is_taken_in_float32_too(model_type: str) -> None:
    ids = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))
    model = routed(model_type)
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")
    found, exact = (measure_contraction(m, ids, method="jvp", seeds=(0,)) for m in (model, wide))
    np.testing.assert_allclose(found.rho, exact.rho, rtol=1e-3)
    assert found.above_floor.all()
    assert model.config._experts_implementation == "grouped_mm"
