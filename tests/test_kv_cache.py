"""A cache of few bits: keys and values rounded a token and a head at a time, against rounding by hand in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import hooks_of, make_tiny
from transformers import PreTrainedModel

from experiments.kv_cache import with_rounded_cache
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.explaining.explain import explain
from lyapunov_prune.models.structure import find_structure

HEAD = 8


def on_grid(x: np.ndarray, bits: int) -> np.ndarray:
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    return low + step * np.round((x - low) / step)


def heads_rounded(output: torch.Tensor, start: int, stop: int, bits: int) -> torch.Tensor:
    done = output.clone().numpy()
    for at in range(start, stop, HEAD):
        done[..., at : at + HEAD] = on_grid(done[..., at : at + HEAD], bits)
    return torch.from_numpy(done)


def by_hand(model: PreTrainedModel, layers: list[int], bits: int) -> PreTrainedModel:
    """A copy with keys and values of these layers rounded, by the names of its family."""
    other = copy.deepcopy(model)
    for k in layers:
        layer: Any = find_structure(other).layers[k]
        if model.config.model_type == "gpt2":  # query, key and value side by side
            layer.attn.c_attn.register_forward_hook(lambda m, args, out: heads_rounded(out, 32, 96, bits))
        else:
            for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                module.register_forward_hook(lambda m, args, out: heads_rounded(out, 0, out.shape[-1], bits))
    return other


@torch.no_grad()
def log_p(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_layer_costs_what_its_rounded_cache_does(name: str, ids: torch.Tensor) -> None:
    dense = make_tiny(name).double()
    found = explain(dense, with_rounded_cache(dense, 4), ids[:2])
    p = log_p(dense, ids[:2])

    def kl(layers: list[int]) -> float:
        return float((p.exp() * (p - log_p(by_hand(dense, layers, 4), ids[:2]))).sum(-1).mean())

    np.testing.assert_allclose(found.kl, kl([*range(6)]), rtol=2e-5)
    for k in range(6):
        np.testing.assert_allclose(found.kl_only[k + 1], kl([k]), rtol=2e-5)
        np.testing.assert_allclose(found.kl_but[k + 1], kl([i for i in range(6) if i != k]), rtol=2e-5)
    assert found.adds_up
    assert found.matrices is None
    assert "cache of 4 bits" in found.headline()


@pytest.mark.parametrize("name", ["gpt_neox", "gemma3", "qwen3"])
def test_fewer_bits_cost_more_and_the_model_stays_as_it_was(name: str, ids: torch.Tensor) -> None:
    dense = make_tiny(name)
    costs = []
    for bits in (8, 4, 2):
        held = with_rounded_cache(dense, bits)
        pairs = zip(dense.parameters(), held.model.parameters(), strict=True)
        assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)  # no second copy in memory
        costs.append(explain(dense, held, ids[:1]).kl)
    assert 0 < costs[0] < costs[1] < costs[2]
    assert hooks_of(dense) == 0


def test_other_bits_and_latent_attention_are_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="bits is 3"):
        with_rounded_cache(make_tiny("llama"), 3)
    with pytest.raises(LyapunovPruneError, match="known to make its keys and values"):
        with_rounded_cache(make_zoo("deepseek_v3"), 4)
