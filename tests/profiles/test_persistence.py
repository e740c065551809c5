"""ρ along time against recurrences rolled by hand in float64, and on every kind of family that has a state."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpus import FakeGPUs, spread
from families.zoo import make_zoo
from helpers import QUICK, VOCABULARY, from_settings, hooks_of
from torch.nn.functional import conv1d, pad, silu, softplus
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import LyapunovPruneError, measure_contraction
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles import PersistenceProfile, measure_persistence, persistence
from lyapunov_prune.profiles.persistence import Transition
from lyapunov_prune.profiles.propagation import direction

ROWS, HEADS = 6, 2


def bounds(shape: tuple[int, ...], step, steps: int = 3) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """`Transition.bound` of a state (one window) that follows `step(t, S)` plus an input, with two random errors."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64)

    clean = drawn()
    transition = Transition(clean, 0.1)
    errors = [0.1 * drawn() for _ in range(2)]
    states = [clean, *(clean + error for error in errors), *(clean + move for move in transition.moves())]
    assert len(states) == 3 + transition.probes
    found = []
    for k in range(steps + 1):
        if k:
            entering = drawn()
            states = [step(k, state) + entering for state in states]
        differences = [state - states[0] for state in states[1:]]
        found.append(float(transition.bound(k, differences[2:], torch.stack(differences[:2]))[0]))
    return torch.tensor(found)


def test_entry_by_entry_it_is_the_largest_product() -> None:
    decay = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    largest = [1.0, *(float(decay[1 : k + 1].prod(0).max()) for k in (1, 2, 3))]
    torch.testing.assert_close(bounds((3, 5), lambda k, S: decay[k] * S), torch.tensor(largest), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("columns", [4, 6, 9])
def test_one_matrix_a_head_is_found_whatever_the_number_of_columns(columns: int) -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.nn.functional.normalize(
        torch.randn(4, HEADS, ROWS, 1, generator=generator, dtype=torch.float64), dim=2
    )
    steps = 0.9 * (torch.eye(ROWS, dtype=torch.float64) - 0.7 * keys @ keys.mT)
    norms, product = [1.0], torch.eye(ROWS, dtype=torch.float64)
    for k in (1, 2, 3):
        product = steps[k] @ product
        norms.append(float(torch.linalg.matrix_norm(product, ord=2).max()))
    found = bounds((HEADS, ROWS, columns), lambda k, S: steps[k] @ S)
    torch.testing.assert_close(found, torch.tensor(norms), rtol=1e-5, atol=2e-6)
    assert found[3] < 0.9**3 + 1e-5


@pytest.mark.parametrize("shape", [(5,), (HEADS, ROWS, 4)])
def test_a_recurrence_of_another_form_has_no_bound(shape: tuple[int, ...]) -> None:
    found = bounds(shape, lambda k, S: torch.tanh(S))
    assert found[0] == 1
    assert all(math.isnan(value) for value in found[1:])


IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
STEPS = 12
FAMILIES = [
    *("mamba", "falcon_mamba", "mamba2", "recurrent_gemma", "jamba", "zamba", "zamba2", "granitemoehybrid", "bamba"),
    *("falcon_h1", "nemotron_h", "qwen3_next", "qwen3_5_text", "lfm2", "minimax", "olmo_hybrid", "kimi_linear"),
    *("bailing_hybrid", "qwen4_exp_text", "zaya"),
]


def inputs_of(model: PreTrainedModel) -> list[torch.Tensor]:
    """What enters every layer when the whole text is read at once."""
    entered: list[torch.Tensor] = []
    layers = find_structure(model).layers
    with hooked(before=[(layer, lambda module, args, kwargs: entered.append(args[0])) for layer in layers]):
        model(IDS, use_cache=False)
    return entered


def decays_mamba(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """exp(Δ_t A), windows × tokens × channels × state."""
    mixer = layer.mixer
    x = mixer.in_proj(layer.norm(hidden)).transpose(1, 2).chunk(2, dim=1)[0]
    kernel = mixer.conv1d.weight
    x = silu(conv1d(pad(x, (kernel.shape[-1] - 1, 0)), kernel, mixer.conv1d.bias, groups=len(kernel))).transpose(1, 2)
    step = softplus(mixer.dt_proj(mixer.x_proj(x)[..., : mixer.time_step_rank]))
    return torch.exp(-step.unsqueeze(-1) * mixer.A_log.exp())


def decays_mamba2(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """exp(Δ_t A), windows × tokens × heads × 1 × 1: one number a head."""
    mixer = layer.mixer
    step = softplus(mixer.in_proj(layer.norm(hidden))[..., -mixer.num_heads :] + mixer.dt_bias)
    return torch.exp(-step * mixer.A_log.exp())[..., None, None]


@pytest.mark.parametrize(
    ("name", "decays", "shape"),
    [("mamba", decays_mamba, (64, 8)), ("mamba2", decays_mamba2, (4, 16, 8))],
)
@torch.no_grad()
def test_agrees_with_the_recurrence_rolled_in_float64(
    name: str, decays: Callable[..., torch.Tensor], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_zoo(name).double()
    found = measure_persistence(model, IDS, seeds=(0, 3), batch_size=2)
    left, bound = np.ones((8, STEPS + 1)), np.ones((8, STEPS + 1))
    flat = torch.ones(2, int(np.prod(shape)))
    errors = torch.stack([direction(flat, 0, seed).view(2, *shape).double() for seed in (0, 3)])
    for i, (layer, hidden) in enumerate(zip(find_structure(model).layers, inputs_of(model), strict=True)):
        products = decays(layer, hidden)[:, -STEPS:].cumprod(1)
        bound[i, 1:] = products.flatten(2).amax((0, 2))
        kept = (products * errors.unsqueeze(2)).flatten(3).square().sum(-1)
        left[i, 1:] = (kept / errors.flatten(2).square().sum(-1, keepdim=True)).mean((0, 1)).sqrt()
    np.testing.assert_allclose(found.left, left, rtol=1e-4)
    np.testing.assert_allclose(found.bound, bound, rtol=1e-4)
    if name == "mamba":
        return
    # Planted fault: every token decays as the one before it.
    step = persistence._Run._step
    monkeypatch.setattr(persistence._Run, "_step", lambda run, carried, t: step(run, carried, t - 1))
    wrong = measure_persistence(model, IDS, seeds=(0, 3), batch_size=2)
    assert not np.allclose(wrong.left, left, rtol=1e-3)


@torch.no_grad()
def test_the_gated_delta_rule_stays_below_its_gates() -> None:
    """`‖a (I − β k kᵀ)‖ ≤ a` for keys of length one and β in [0, 2]: never more than the product of the gates."""
    model = make_zoo("olmo_hybrid")
    found = measure_persistence(model, IDS, seeds=(0,))
    layers, entered = find_structure(model).layers, inputs_of(model)
    for at, index in enumerate(found.layers):
        layer: Any = layers[index]
        mixer = layer.linear_attn
        step = softplus(mixer.a_proj(layer.input_layernorm(entered[index])) + mixer.dt_bias)
        gates = torch.exp(-mixer.A_log.exp() * step)[:, -STEPS:].cumprod(1).amax((0, 2)).numpy()
        assert (found.bound[at, 1:] <= gates * (1 + 1e-5) + 1e-4).all()
        assert (found.bound[at, 1:] > 0.3 * gates).all()  # no head forgets faster than that here


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_a_state_is_measured_and_bounded(name: str) -> None:
    model = make_zoo(name)
    found = measure_persistence(model, IDS[:1, :12], seeds=(0,))
    assert hooks_of(model) == 0
    assert found.tokens == 6
    assert (found.left <= found.bound * (1 + 1e-3) + 1e-4).all()
    assert (found.bound[~np.array(found.convolution)] < 1.001).all()
    assert (found.output[:, 0] > 0).all()
    if name == "lfm2":
        assert all(found.convolution)
        np.testing.assert_array_equal(found.bound, [[1, 1, 1, 0, 0, 0, 0]] * 6)
        assert (found.left[:, 3:] < 1e-4).all()
        assert (found.rho == 0).all()


@torch.no_grad()
def test_what_reaches_the_predictions_is_what_a_moved_cache_gives() -> None:
    model: Any = make_zoo("mamba")
    found = measure_persistence(model, IDS[:1], seeds=(0,), epsilon=0.5)
    for layer in (0, 5):
        log_p = []
        for moved in (False, True):
            cache = model(IDS[:1, :STEPS], use_cache=True).cache_params
            state = cache.layers[layer].recurrent_states
            if moved:
                state[0] = state[0] + 0.5 * direction(state[0].flatten(1), 0, 0).view_as(state[0])
            steps = [model(IDS[:1, [t]], cache_params=cache, use_cache=True) for t in range(STEPS, 2 * STEPS)]
            log_p.append(torch.cat([step.logits[:, -1] for step in steps]).double().log_softmax(-1))
        kl = (log_p[0].exp() * (log_p[0] - log_p[1])).sum(-1)
        np.testing.assert_allclose(found.kl[layer], kl, rtol=1e-2, atol=1e-9)


def test_windows_are_the_same_whatever_the_batch_size_and_depth_is_measured_beside() -> None:
    model = make_zoo("granitemoehybrid")
    ids = IDS[:, :12]
    found, again = (measure_persistence(model, ids, seeds=(0, 1), batch_size=size) for size in (1, 2))
    np.testing.assert_allclose(found.left, again.left, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.bound, again.bound, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found.depth.rho, measure_contraction(model, ids, seeds=(0, 1)).rho)


def test_layers_on_two_gpus_give_the_same() -> None:
    model, ids = make_zoo("olmo_hybrid"), IDS[:, :8]
    here = measure_persistence(model, ids, seeds=(0,))
    with FakeGPUs():
        there = measure_persistence(spread(model, 1), ids, seeds=(0,))
    for name in ("left", "bound", "output", "kl"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-3, atol=1e-5)


def test_bad_input_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="no layer of llama has a recurrent state"):
        measure_persistence(llama, IDS)
    model = make_zoo("mamba2")
    for wrong, told in (({"seeds": ()}, "seed"), ({"epsilon": 1e-30}, "epsilon"), ({"epsilon": 0.0}, "epsilon")):
        with pytest.raises(LyapunovPruneError, match=told):
            measure_persistence(model, IDS, **wrong)  # type: ignore[arg-type]
    find_structure(model).layers[3].get_submodule("mixer.in_proj").weight.data[0] = torch.nan
    with pytest.raises(LyapunovPruneError, match="layer 3"):
        measure_persistence(model, IDS)


def test_the_command_writes_result_and_report(run: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
    from_settings("mamba", **sizes).save_pretrained("states")
    tokenizer.save_pretrained("states")
    done = run("profile", "states", "--along", "time", *QUICK)
    assert done.code == 0, done.err
    assert done.out.startswith("An error in the state lasts longest in layer ")
    assert {"runs/states/persistence.json", "runs/states/report.html"} <= done.changed
    found = PersistenceProfile.load("runs/states/persistence.json")
    assert (found.layers, found.tokens, found.seeds) == ((0, 1, 2), 32, (0,))
    assert "How long errors last in recurrent states" in Path("runs/states/report.html").read_text()


def test_the_command_refuses_what_has_no_effect(run_bad: Callable[..., str]) -> None:
    for option, told in (
        (["--device", "disk"], "--along time needs the model in memory"),
        ([], "no layer of llama has a recurrent state"),
    ):
        assert told in run_bad("profile", "tiny", "--along", "time", *QUICK, *option)
