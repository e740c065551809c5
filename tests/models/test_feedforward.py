"""Feed-forward blocks: found in every plain family and in image models, proven by running, refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import TINY, make_classifier, make_other, make_tiny
from scipy.special import erf
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.families import FAMILIES, TRUSTED
from lyapunov_prune.models.feedforward import FeedForward, find_feedforward
from lyapunov_prune.models.structure import find_layers, find_structure

# Block, gate, up, out and activation, as the families call them.
LLAMA = ("mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn")
GPT2 = ("mlp", None, "mlp.c_fc", "mlp.c_proj", "mlp.act")
NAMES: dict[str, tuple[str, str | None, str, str, str]] = {
    "gpt2": GPT2,
    "gpt2-inverse-layer": GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), LLAMA),
    "phi3": ("mlp", "mlp.gate_up_proj:gate", "mlp.gate_up_proj:up", "mlp.down_proj", "mlp.activation_fn"),
    "gpt_neox": ("mlp", None, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.act"),
    "opt": ("", None, "fc1", "fc2", "activation_fn"),
}
OTHERS: dict[str, tuple[str, str | None, str, str, str]] = {
    "glm4": ("mlp", "mlp.gate_up_proj:gate", "mlp.gate_up_proj:up", "mlp.down_proj", "mlp.activation_fn"),
    "biogpt": ("", None, "fc1", "fc2", "activation_fn"),
    "phi": ("mlp", None, "mlp.fc1", "mlp.fc2", "mlp.activation_fn"),
}
IMAGES = ("mlp", None, "mlp.fc1", "mlp.fc2", "mlp.activation_fn")


def told(block: FeedForward) -> tuple[str, str | None, str, str, str]:
    return (
        block.block,
        None if block.gate is None else block.gate.name,
        block.up.name,
        block.out.name,
        block.activation,
    )


def test_the_ten_plainest_families_are_those_that_are_tried() -> None:
    assert {TINY[name][0] for name in NAMES} == TRUSTED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_every_layer_of_every_plain_family_has_its_block(name: str, dtype: torch.dtype) -> None:
    model = make_tiny(name).to(dtype)
    structure = find_structure(model)
    for layer in range(structure.num_layers):
        block = find_feedforward(structure, layer)
        assert block.layer == layer
        assert told(block) == NAMES[name]


@pytest.mark.parametrize("name", OTHERS)
def test_fused_and_bare_blocks_of_other_families(name: str) -> None:
    assert told(find_feedforward(find_structure(make_other(name)), 1)) == OTHERS[name]


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_image_models_are_read_by_their_layers(name: str) -> None:
    structure = find_layers(make_classifier(name))
    for index in range(structure.num_layers):
        assert told(find_feedforward(structure, index)) == IMAGES


# The parts, against numpy.


def gelu_tanh(z: np.ndarray) -> np.ndarray:
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def silu(z: np.ndarray) -> np.ndarray:
    return z / (1 + np.exp(-z))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gpt2": gelu_tanh,
    "gemma2": gelu_tanh,
    "gpt_neox": lambda z: 0.5 * z * (1 + erf(z / np.sqrt(2))),
    "opt": lambda z: np.maximum(z, 0),
    "phi3": silu,
    "llama": silu,
}


def run_block(layer: Any, name: str, x: torch.Tensor) -> np.ndarray:
    """The block as the family runs it."""
    y = layer.fc2(layer.activation_fn(layer.fc1(x))) if name == "opt" else layer.mlp(x)
    return y.detach().numpy()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_parts_are_the_block(name: str) -> None:
    """The formula in numpy, on a block whose biases are not zero."""
    model = make_tiny(name, **({"mlp_bias": True} if name == "llama" else {})).double()
    structure = find_structure(model)
    layer: Any = structure.layers[3]
    block = find_feedforward(structure, 3)
    parts = block.parts(layer)
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def linear(x: np.ndarray, pair: tuple[torch.Tensor, torch.Tensor | None]) -> np.ndarray:
        return x @ pair[0].numpy().T + (0 if pair[1] is None else pair[1].numpy())

    if parts.gate is None:
        hidden = ACTIVATIONS[name](linear(x.numpy(), parts.up))
    else:
        hidden = ACTIVATIONS[name](linear(x.numpy(), parts.gate)) * linear(x.numpy(), parts.up)
    np.testing.assert_allclose(parts.hidden(x), hidden, rtol=1e-10, atol=1e-12)
    own = run_block(layer, name, x)
    np.testing.assert_allclose(linear(hidden, parts.out), own, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(parts(x), own, rtol=1e-10, atol=1e-12)
    assert (parts.up[1] is not None) == (name not in ("gemma2", "phi3"))
    assert parts.numbers == sum(
        p.numel() for n, p in layer.named_parameters() if n.startswith(("mlp.", "fc1.", "fc2."))
    )


def test_a_block_says_the_same_of_a_copy() -> None:
    model = make_tiny("llama")
    block = find_feedforward(find_structure(model), 2)
    other = copy.deepcopy(model)
    layer = find_structure(other).layers[2]
    layer.mlp.up_proj.weight.data.zero_()
    assert not block.parts(layer).up[0].any()
    assert block.parts(find_structure(model).layers[2]).up[0].any()


def test_dropout_is_no_part_of_a_block_and_the_mode_is_put_back() -> None:
    model = make_tiny("gpt2", resid_pdrop=0.5).train()
    block = find_feedforward(find_structure(model), 0)
    assert told(block) == GPT2
    assert model.transformer.h[0].mlp.dropout.training


# What is refused, with the reason.


def refuse(model: PreTrainedModel, layer: int, match: str) -> None:
    with pytest.raises(LyapunovPruneError, match=match) as refused:
        find_feedforward(find_structure(model), layer)
    assert "other layers" in str(refused.value)


def test_a_norm_between_the_matrices() -> None:
    model = make_tiny("opt")

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.norm = nn.ReLU(), nn.LayerNorm(48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.act(x))

    model.model.decoder.layers[1].activation_fn = Normed()
    find_feedforward(find_structure(model), 0)
    refuse(model, 1, r"layer 1 has a LayerNorm \(activation_fn.norm\) between the matrices")
    config = transformers.AutoConfig.for_model(
        "bitnet",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    refuse(transformers.AutoModelForCausalLM.from_config(config).eval(), 1, r"BitNetRMSNorm \(mlp.ffn_sub_norm\)")


def test_experts_and_several_blocks() -> None:
    for model_type in ("mixtral", "qwen3_moe"):
        config = transformers.AutoConfig.for_model(
            model_type,
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts=4,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        refuse(model, 1, r"layer 1 has experts or several feed-forward blocks \(mlp.experts.gate_up_proj:0, …\)")
    model = make_tiny("llama")
    model.model.layers[0].mlp.experts = nn.ModuleList([copy.deepcopy(model.model.layers[0].mlp)])
    refuse(model, 0, r"layer 0 has experts or several .* \(mlp.experts.0.gate_proj, …\)")


def test_matrices_that_layers_share() -> None:
    model = make_tiny("llama")
    model.model.layers[4].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    refuse(model, 1, "mlp.up_proj of layer 1 is also a matrix of layer 4")
    refuse(model, 4, "mlp.up_proj of layer 4 is also a matrix of layer 1")
    find_feedforward(find_structure(model), 2)


def test_a_gate_whose_matrices_lie_bare_in_the_layer() -> None:
    model = make_tiny("opt")
    layer: Any = find_structure(model).layers[0]
    layer.gate_proj = nn.Linear(layer.fc1.in_features, layer.fc1.out_features)
    layer.forward = lambda x: layer.fc2(layer.activation_fn(layer.gate_proj(x)) * layer.fc1(x))
    refuse(model, 0, "a gate whose matrices lie bare in the layer")


def test_unknown_shapes() -> None:
    model = make_tiny("llama")
    mlp: Any = model.model.layers[0].mlp
    mlp.down_proj.forward = lambda x: 2 * nn.functional.linear(x, mlp.down_proj.weight)
    refuse(model, 0, "mlp.down_proj gives another output than its matrices and its activation")
    mlp = model.model.layers[1].mlp
    mlp.act_fn = nn.Identity()
    refuse(model, 1, "is a function")
    mlp = model.model.layers[2].mlp
    mlp.act_fn = nn.Sequential(nn.SiLU(), nn.ReLU())
    refuse(model, 2, r"ReLU \(mlp.act_fn.1\) between the matrices")
    mlp = model.model.layers[3].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(2 * mlp.gate_proj(x)) * mlp.up_proj(x))
    refuse(model, 3, "its SiLUActivation is given something else than a matrix's output")
    mlp = model.model.layers[4].mlp
    del mlp.down_proj
    refuse(model, 4, r"layer 4 .*mlp.gate_proj \(48, 32\)")
    model = make_tiny("llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Linear(32, 47)
    refuse(model, 0, r"its matrices are mlp.gate_proj \(48, 32\), mlp.up_proj \(47, 32\), mlp.down_proj \(32, 48\)")
    mlp = model.model.layers[1].mlp
    bare = mlp.forward
    mlp.forward = lambda x, residual: residual + bare(x)
    refuse(model, 1, "in LlamaMLP")
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(mlp.up_proj(x)[..., :32]))
    refuse(model, 2, "LlamaMLP does not call each of its matrices once")


@pytest.mark.parametrize("gate", [0, 1])
def test_which_half_of_a_fused_matrix_is_the_gate_shows_when_it_runs(
    gate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FAMILIES, "phi3")
    model = make_tiny("phi3")
    mlp = model.model.layers[0].mlp

    def forward(x: torch.Tensor) -> torch.Tensor:
        halves = mlp.gate_up_proj(x).chunk(2, dim=-1)
        product: torch.Tensor = mlp.down_proj(mlp.activation_fn(halves[gate]) * halves[1 - gate])
        return product

    monkeypatch.setattr(mlp, "forward", forward)
    block = find_feedforward(find_structure(model), 0)
    assert block.gate is not None
    assert (block.gate.start, block.up.start) == ((0, 48) if gate == 0 else (48, 0))


def test_weights_that_are_not_finite() -> None:
    model = make_tiny("gpt_neox")
    model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.data[3, 3] = torch.nan
    with pytest.raises(LyapunovPruneError, match=r"NaN .*layer 1"):
        find_feedforward(find_structure(model), 1)


def test_planted_fault_a_lost_bias_is_seen_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = make_tiny("opt").to(dtype)
        layer: Any = model.model.decoder.layers[2]
        find_feedforward(find_structure(model), 2)
        layer.fc2.forward = lambda x, fc2=layer.fc2: nn.functional.linear(x, fc2.weight)
        refuse(model, 2, "gives another output|does more than")
