"""Growth through attention and MLP: against states in float64, and the product that must be the layer's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hooks_of, make_other, make_tiny, moe, states_of
from transformers import PreTrainedModel

from experiments.sublayer_growth import SublayerGrowth, sublayer_growth
from lyapunov_prune import LyapunovPruneError, NonFiniteError, measure_contraction
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.propagation import direction

# Of a family the child of a layer whose output is added last.
LAST = {
    "gpt2": "mlp",
    "llama": "mlp",
    "gemma2": "post_feedforward_layernorm",
    "opt": "fc2",
    "olmo2": "post_feedforward_layernorm",
    "glm4": "post_mlp_layernorm",
    "lfm2": "feed_forward",
}


@pytest.fixture
def few(ids: torch.Tensor) -> torch.Tensor:
    return ids[:2, :16]


def made(name: str) -> PreTrainedModel:
    return make_other(name) if name in ("olmo2", "glm4", "lfm2") else make_tiny(name)


def stream(
    name: str, model: PreTrainedModel, ids: torch.Tensor, moved: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The stream before and behind every branch: behind the first is what leaves the layer less what was added last."""
    added: list[torch.Tensor] = []
    with ExitStack() as stack:
        for layer in find_structure(model).layers:
            child: Any = getattr(layer, LAST[name])
            stack.callback(child.register_forward_hook(lambda m, a, output: added.append(output)).remove)
        states = states_of(model, ids, moved)
    whole = [states[0]]
    for after, last in zip(states[1:], added, strict=True):
        whole += [after - last.view_as(after), after]
    return whole


@pytest.mark.parametrize("name", list(LAST))
def test_agrees_with_the_states_in_float64(name: str, few: torch.Tensor) -> None:
    found = sublayer_growth(made(name), few, seeds=(0,))
    model = made(name).double()
    error, state, relative = np.zeros((3, 2 * len(found.rho) + 1))
    for window in range(len(few)):
        ids = few[window : window + 1]
        clean = stream(name, model, ids)
        other = stream(name, model, ids, 1e-2 * direction(clean[0].float(), window, 0).double())
        e = np.array([(g - h).square().sum(-1).numpy() for g, h in zip(other, clean, strict=True)])
        h = np.array([h.square().sum(-1).numpy() for h in clean])
        error, state = error + e.sum((1, 2)), state + h.sum((1, 2))
        relative = relative + (e / h).mean((1, 2))
    for values, wanted in ((found.error_growth, error), (found.state_growth, state), (found.token_rho, relative)):
        np.testing.assert_allclose(values.ravel(), wanted[1:] / wanted[:-1], rtol=2e-3)


@pytest.mark.parametrize("model", [make_tiny("llama"), make_tiny("opt"), make_tiny("gemma2"), moe("mixtral")])
def test_the_product_over_the_branches_is_the_layers(model: PreTrainedModel, few: torch.Tensor) -> None:
    whole = measure_contraction(model, few, seeds=(0, 3))
    found = sublayer_growth(model, few, seeds=(0, 3), batch_size=2)
    assert hooks_of(model) == 0
    for parts, product in (
        (found.error_growth, whole.error_growth),
        (found.state_growth, whole.state_growth),
        (found.rho, whole.rho),
        (found.token_rho, whole.pooled("token").rho),
    ):
        np.testing.assert_allclose(parts.prod(1), product, rtol=1e-5)


def test_a_branch_that_adds_nothing_grows_nothing_and_the_other_is_the_layer(few: torch.Tensor) -> None:
    model = make_tiny("llama")
    layers: Any = find_structure(model).layers
    with torch.no_grad():
        layers[2].self_attn.o_proj.weight.zero_()
        layers[4].mlp.down_proj.weight.zero_()
    found, whole = sublayer_growth(model, few), measure_contraction(model, few)
    assert (found.error_growth[2, 0], found.state_growth[2, 0], found.token_rho[4, 1]) == pytest.approx((1, 1, 1))
    assert (found.rho[2, 1], found.rho[4, 0]) == pytest.approx((whole.rho[2], whole.rho[4]))


@pytest.mark.parametrize("name", ["gpt_neox", "phi", "cohere"])
def test_branches_side_by_side_are_refused_by_name(name: str, few: torch.Tensor) -> None:
    model = make_tiny(name) if name == "gpt_neox" else make_other(name)
    with pytest.raises(LyapunovPruneError, match=f"{type(model).__name__} .*layer 0"):
        sublayer_growth(model, few)


def test_bad_activations_are_named_by_layer(few: torch.Tensor) -> None:
    model = make_tiny("llama")
    layers: Any = find_structure(model).layers
    with torch.no_grad():
        layers[3].self_attn.o_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="output of layer 3 "):
        sublayer_growth(model, few)


def test_saves_loads_and_explains_the_extremes(llama: PreTrainedModel, few: torch.Tensor, tmp_path: Path) -> None:
    found = sublayer_growth(llama, few, seeds=(0,))
    assert str(SublayerGrowth.load(found.save(tmp_path / "growth.json"))) == str(found)
    most = int(found.rho.prod(1).argmax())
    assert f"The most ρ, {found.rho[most].prod():.3g} of layer {most}: attention {found.rho[most, 0]:.3g} (" in str(
        found
    )
