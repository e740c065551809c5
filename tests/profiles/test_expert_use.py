"""Tokens, weight and saliency of experts, against the same in float64 with the experts unfused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import MIXTURES, from_settings, make_mixture

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.errors import NonFiniteError
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.expert_use import ExpertUse, expert_use

IDS = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(0))


def unfused(name: str, module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What one expert makes of `x` by its matrices."""
    if name == "dbrx":
        w1, v1, w2 = (getattr(module.mlp, key).unflatten(0, (8, -1))[expert] for key in ("w1", "v1", "w2"))
        return (torch.nn.functional.silu(x @ w1.T) * (x @ v1.T)) @ w2
    into, out = module.gate_up_proj[expert], module.down_proj[expert]
    if name != "gpt_oss":
        gate, up = (x @ into.T).chunk(2, -1)
        return (module.act_fn(gate) * up) @ out.T
    both = x @ into + module.gate_up_proj_bias[expert]
    gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ out + module.down_proj_bias[expert]


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_the_sums_are_those_of_experts_by_themselves(name: str, tmp_path: Any) -> None:
    model = make_mixture(name).double()
    model.set_experts_implementation("eager")
    structure = find_structure(model)
    mixtures = find_mixtures(structure).layers
    if name == "zaya":
        for layer in mixtures:  # the skip is chosen
            structure.layers[layer].get_buffer("mlp.gate.balancing_biases")[-1] = 0
    wanted = np.full((structure.num_layers, 8, 3), np.nan)
    wanted[list(mixtures)] = 0
    others = dict.fromkeys(mixtures, 0)

    def add(layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            for x, chosen, weights in zip(args[0].reshape(-1, 32), *args[1:], strict=True):
                for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
                    if expert >= 8 or not weight:  # LongCat's experts that compute nothing, and Zaya's skip
                        others[layer] += 1
                        continue
                    norm = float(unfused(name, module, expert, x.unsqueeze(0)).norm())
                    wanted[layer, expert] += (1, weight, weight * norm)

        return hook

    with hooked(before=[(structure.layers[i].get_submodule(m.experts), add(i)) for i, m in mixtures.items()]):
        model(IDS)
    use = expert_use(model, IDS, batch_size=2)
    tokens, weight, output = wanted.transpose(2, 0, 1)
    np.testing.assert_array_equal(use.tokens, tokens)
    np.testing.assert_allclose(use.weight, weight, rtol=1e-6)
    np.testing.assert_allclose(use.saliency, output / np.maximum(tokens, 1), rtol=1e-6)
    assert use.layers == tuple(mixtures)
    chosen = 1 if name == "zaya" else 2
    assert np.nansum(use.tokens) + sum(others.values()) == IDS.numel() * chosen * len(mixtures)
    assert any(others.values()) == (name in ("longcat_flash", "zaya"))
    again = ExpertUse.load(use.save(tmp_path / "use.json"))
    assert str(again) == str(use)
    assert use.to_frame().groupby("layer").weight.sum().to_numpy() == pytest.approx(1)


def test_the_kernel_for_all_experts_gives_the_same() -> None:
    model = make_mixture("qwen3_moe")
    fused = expert_use(model, IDS)
    model.set_experts_implementation("eager")
    np.testing.assert_allclose(fused.saliency, expert_use(model, IDS).saliency, rtol=1e-4)


def test_bad_models_are_refused() -> None:
    spoiled: Any = make_mixture("mixtral")
    spoiled.model.layers[1].mlp.experts.down_proj.data[:] = torch.nan
    with pytest.raises(NonFiniteError, match="layer 1"):
        expert_use(spoiled, IDS)
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    other = from_settings("llama4_text", **small, **heads, num_local_experts=4, interleave_moe_layer_step=1)
    with pytest.raises(LyapunovPruneError, match=r"experts of layer 0 .*not called"):
        expert_use(other, IDS)
