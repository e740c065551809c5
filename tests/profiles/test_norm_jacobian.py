"""The Jacobian of a norm against autograd, and the share of a travelling error that it removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, hooks_of, make_other, make_tiny, states_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian
from torch.nn.functional import layer_norm, rms_norm
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError, NonFiniteError
from lyapunov_prune.linalg import exact_norm
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles import NormProjection, norm_jacobian, norm_projection
from lyapunov_prune.profiles.propagation import direction


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(3, 12), st.booleans(), st.sampled_from([0.0, 1e-5, 0.5]))
def test_is_autograds_in_float64(seed: int, d: int, centred: bool, epsilon: float) -> None:
    x, weight = drawn(seed, d) * 3 + 1, drawn(seed + 1, d)
    norm = layer_norm if centred else rms_norm
    wanted = jacobian(lambda x: norm(x, (d,), weight, eps=epsilon), x)
    torch.testing.assert_close(norm_jacobian(x, weight, centred=centred, epsilon=epsilon), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("centred", [True, False])
def test_projects_out_what_it_says_and_its_spectral_norm_lies_where_it_says(centred: bool) -> None:
    x, weight = drawn(0, 9) + 2, drawn(1, 9)
    state = x - x.mean() if centred else x
    plain = norm_jacobian(x, centred=centred)
    assert float((plain @ state).norm()) < 1e-12
    assert (float((plain @ torch.ones(9).double()).norm()) < 1e-12) == centred
    assert exact_norm(plain) == pytest.approx(1 / float(state.square().mean().sqrt()))
    largest = (weight.abs() / state.square().mean().sqrt()).sort(descending=True).values
    assert largest[1 + centred] - 1e-12 <= exact_norm(norm_jacobian(x, weight, centred=centred)) <= largest[0] + 1e-12


def test_planted_fault_a_jacobian_without_the_radial_part_is_off() -> None:
    x = drawn(0, 8)
    wrong = (torch.eye(8).double() - 1 / 8) / x.std(correction=0)
    wanted = jacobian(lambda x: layer_norm(x, (8,), eps=0), x)
    assert not torch.allclose(wrong, wanted, rtol=1e-2)
    assert not torch.allclose(norm_jacobian(x, centred=False), wanted, rtol=1e-2)


def test_states_that_have_no_jacobian_are_refused() -> None:
    for bad in (torch.ones(2, 3), torch.tensor([1.0, torch.nan])):
        with pytest.raises(LyapunovPruneError, match="one finite state"):
            norm_jacobian(bad)
    with pytest.raises(LyapunovPruneError, match="without spread"):
        norm_jacobian(torch.ones(4))
    assert norm_jacobian(torch.ones(4), epsilon=1e-5).isfinite().all()


@pytest.mark.parametrize(("name", "centred"), [("gpt2", True), ("opt", True), ("llama", False), ("gemma2", False)])
def test_the_share_is_that_of_the_states_in_float64(name: str, centred: bool, ids: torch.Tensor) -> None:
    few = ids[:2, :12]
    found = norm_projection(make_tiny(name), few, seeds=(0,))
    assert found.centred == (centred,) * LAYERS
    model = make_tiny(name).double()
    removed, whole = np.zeros(LAYERS), np.zeros(LAYERS)
    for window in range(len(few)):
        clean = states_of(model, few[window : window + 1])
        moved = 1e-2 * direction(clean[0].float(), window, 0).double()
        for k, other in enumerate(states_of(model, few[window : window + 1], moved)[:LAYERS]):
            for h, e in zip(clean[k][0], (other - clean[k])[0], strict=True):
                J = norm_jacobian(h, centred=centred)
                kept = J @ e * (h.std(correction=0) if centred else h.square().mean().sqrt())
                removed[k] += float(e.square().sum() - kept.square().sum())
                whole[k] += float(e.square().sum())
    np.testing.assert_allclose(found.removed, removed / whole, rtol=5e-3)
    assert found.chance == 1 / 32


def test_the_stretch_is_the_largest_weight_over_the_states_size(ids: torch.Tensor) -> None:
    for name in ("gpt2", "gemma2"):
        model = make_tiny(name)
        layers: Any = find_structure(model).layers
        norm = layers[2].ln_1 if name == "gpt2" else layers[2].input_layernorm
        with torch.no_grad():
            norm.weight[3] = 7.0
        largest = 7.0 + (name == "gemma2")  # which keeps γ − 1
        h = states_of(model, ids)[2]
        sigma = h.std(-1, correction=0) if name == "gpt2" else h.square().mean(-1).sqrt()
        assert norm_projection(model, ids).stretch[2] == pytest.approx(largest / float(sigma.median()), rel=1e-3)


def test_bad_input_and_families_without_such_a_norm_are_refused(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match=r"attention of Olmo2ForCausalLM; its norms come behind"):
        norm_projection(make_other("olmo2"), ids)
    with pytest.raises(LyapunovPruneError, match="one seed or more"):
        norm_projection(llama, ids, seeds=())
    model = make_tiny("llama")
    layers: Any = find_structure(model).layers
    with torch.no_grad():
        layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="output of layer 1 "):
        norm_projection(model, ids)


def test_saves_loads_and_prints(llama: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    found = norm_projection(llama, ids, batch_size=2)
    assert str(NormProjection.load(found.save(tmp_path / "norms.json"))) == str(found)
    np.testing.assert_allclose(found.removed, norm_projection(llama, ids).removed, rtol=1e-3)
    assert hooks_of(llama) == 0
    assert "projects out (radial direction): median" in str(found)
