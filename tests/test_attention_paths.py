"""The value path and the weight path of attention, against the inputs of the output projection in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from experiments.attention_paths import _split, attention_paths
from lyapunov_prune import LyapunovPruneError, NonFiniteError, compress, remove_layers
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap

STEPS = 4
MEASURES = ("value", "weight", "both", "total", "prompt_weight", "prompt_share")


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(97, (2, 7), generator=torch.Generator().manual_seed(3))


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    return compress(model, method="rtn", bits=3).model


def changed(model: PreTrainedModel, name: str) -> PreTrainedModel:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_submodule(name).weight += 0.05 * torch.randn(twin.get_submodule(name).weight.shape)
    return twin


@torch.no_grad()
def outputs(model: PreTrainedModel, prompt: torch.Tensor) -> list[torch.Tensor]:
    """What enters every output projection at the decoding positions, float64."""
    ids = torch.cat([prompt, continued(read(wrap(model), prompt), prompt, STEPS)], 1)[:, :-1]
    twin, found = copy.deepcopy(model).double().eval(), []
    names = [
        n for n, _ in twin.named_modules() if n.endswith(("self_attn.o_proj", "attn.c_proj", "self_attn.out_proj"))
    ]
    for name in names:
        twin.get_submodule(name).register_forward_pre_hook(lambda module, args: found.append(args[0][0, -STEPS:]))
    twin(ids, use_cache=False)
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "qwen3"])
def test_the_whole_change_is_that_of_what_enters_the_output_projection(family: str, prompts: torch.Tensor) -> None:
    dense = make_tiny(family)
    small = rounded(dense)
    found = attention_paths(dense, small, prompts, steps=STEPS)
    wanted = np.zeros((LAYERS, STEPS))
    for prompt in prompts:
        for layer, (o, o2) in enumerate(zip(outputs(dense, prompt[None]), outputs(small, prompt[None]), strict=True)):
            wanted[layer] += ((o2 - o).norm(dim=-1) / o.norm(dim=-1)).numpy() / len(prompts)
    np.testing.assert_allclose(found.total, wanted, rtol=2e-4)
    assert found.layers == tuple(range(LAYERS))


def test_the_terms_add_up_to_the_change() -> None:
    """On made-up weights: the three terms are the change, and its norms are those of the definitions."""
    g = torch.Generator().manual_seed(0)
    a, a2 = (torch.rand(3, STEPS, 9, generator=g).double().softmax(-1) for _ in range(2))
    v, v2 = (torch.randn(3, 9, 5, generator=g).double() for _ in range(2))
    o, o2 = (torch.einsum("hts,hsd->thd", *x).flatten(1) for x in ((a, v), (a2, v2)))
    terms = [torch.einsum("hts,hsd->thd", x, y).flatten(1) for x, y in ((a, v2 - v), (a2 - a, v), (a2 - a, v2 - v))]
    torch.testing.assert_close(sum(terms), o2 - o)
    found = _split(a, v, a2, v2, prompt=6)
    for row, wanted in zip(found, [*terms, o2 - o], strict=False):
        torch.testing.assert_close(row, wanted.norm(dim=-1) / o.norm(dim=-1))
    torch.testing.assert_close(found[4], a[..., :6].sum(-1).mean(0))
    P, G = (
        torch.einsum("hts,hsd->thd", a2[..., s], v2[:, s]) - torch.einsum("hts,hsd->thd", a[..., s], v[:, s])
        for s in (slice(0, 6), slice(6, None))
    )
    p, rest = (x.flatten(1).norm(dim=-1) for x in (P, G))
    torch.testing.assert_close(found[5], p / (p + rest))


@pytest.mark.parametrize(("matrix", "path", "other"), [("v_proj", "value", "weight"), ("q_proj", "weight", "value")])
def test_a_change_takes_its_own_path(
    llama: PreTrainedModel, prompts: torch.Tensor, matrix: str, path: str, other: str
) -> None:
    """At the first step both models read the same text: in layer 0 nothing else has changed."""
    found = attention_paths(llama, changed(llama, f"model.layers.0.self_attn.{matrix}"), prompts, steps=STEPS)
    assert getattr(found, path)[0, 0] > 0
    assert getattr(found, other)[0, 0] == found.both[0, 0] == 0
    assert getattr(found, path)[0, 0] == pytest.approx(found.total[0, 0])


def test_the_first_step_sees_nothing_but_the_prompt(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = attention_paths(llama, rounded(llama), prompts, steps=STEPS)
    np.testing.assert_allclose(found.prompt_weight[:, 0], 1)
    np.testing.assert_allclose(found.prompt_share[:, 0], 1)
    assert (found.prompt_weight[:, 1:] < 1).all()


def test_a_model_does_not_differ_from_itself(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    found = attention_paths(llama, copy.deepcopy(llama), prompts, steps=STEPS)
    for name in MEASURES[:4]:
        assert not getattr(found, name).any(), name
    assert np.isnan(found.prompt_share).all()


def test_planted_faults_are_told_and_the_model_attends_as_before(
    llama: PreTrainedModel, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = llama.config._attn_implementation
    eager = modeling_llama.eager_attention_forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output, weights = eager(*args, **kwargs)
        return 1.01 * output, weights

    def looking_ahead(*args: Any, **kwargs: Any) -> Any:
        return eager(*args[:4], None, **kwargs)

    for fault, told in ((scaled, "weighted sum"), (looking_ahead, "another output")):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", fault)
        with pytest.raises(LyapunovPruneError, match=told):
            attention_paths(llama, llama, prompts, steps=1)
        assert llama.config._attn_implementation == before


def test_refusals(llama: PreTrainedModel, prompts: torch.Tensor) -> None:
    with pytest.raises(LyapunovPruneError, match="different layers"):
        attention_paths(llama, remove_layers(llama, [2]), prompts, steps=1)
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=97, hidden_size=32, n_head=4))
    with pytest.raises(LyapunovPruneError, match="interface"):
        attention_paths(bloom, bloom, prompts, steps=1)
    broken = copy.deepcopy(llama)
    broken.model.layers[2].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 2"):
        attention_paths(llama, broken, prompts, steps=1)
