"""Routed experts are found in every form that is known, and leave with their rows of the router."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import MIXTURES, from_settings, make_mixture, make_tiny, operated
from helpers.tiny_models import SMALL
from transformers import PreTrainedModel

from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.models.mixtures import Router, find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ExpertsGone


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_stacked_by_expert_leaves_and_nothing_else(name: str) -> None:
    model = make_mixture(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    mixtures = find_mixtures(find_structure(model))
    groups, chosen = 2 if name == "deepseek_v3" else 1, 1 if name == "zaya" else 2
    assert mixtures.router == Router(8, chosen, groups, 1)
    assert set(mixtures.layers) == set(range(len(find_structure(model).layers))) - ({0} if groups == 2 else set())
    model = operated(model, PruningPlan.given(model, ExpertsGone((), dict.fromkeys(mixtures.layers, (1, 6)))))
    stacked = re.compile(r"\.experts\.|\.gate\.weight|\.router\.|e_score|router_mlp\.out_proj|balancing")
    for key, tensor in model.state_dict().items():
        wanted = before[key]
        if stacked.search(key):
            entries = wanted.squeeze(0) if "moe_statics" in key else wanted
            if name == "dbrx" and "experts" in key:
                entries = entries.unflatten(0, (8, -1))
            stay = [0, 2, 3, 4, 5, 7, *range(8, len(entries))]  # what a router scores beside the experts stays
            wanted = entries[stay].reshape(tensor.shape)
        assert torch.equal(tensor, wanted), key
    after = find_mixtures(find_structure(model))
    assert after.router == Router(6, chosen, groups, 1)


def test_the_largest_number_that_can_go() -> None:
    assert [Router(8, k).most for k in (1, 2, 8)] == [7, 6, 0]
    assert Router(256, 8, 8, 4).most == 8 * 30  # a group is scored by its best two
    assert Router(16, 6, 4, 2).most == 4 * (4 - 3)
    for count in (0, -1, 7):
        with pytest.raises(LyapunovPruneError, match="give 1 to 6"):
            Router(8, 2).require_removed(count)
    with pytest.raises(LyapunovPruneError, match="none can go"):
        Router(4, 2, 2, 1).require_removed(2)
    with pytest.raises(LyapunovPruneError, match="multiple of 2"):
        Router(8, 2, 2, 1).require_removed(3)


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({0: (0,), 1: (0, 1), 2: (0, 1)}, "layer 0 has no experts"),
        ({1: (0, 4)}, "layer 2 keeps all of its 8"),
        ({1: (0, 8), 2: (0, 4)}, "no expert 8"),
        ({1: (0, 1), 2: (0, 4)}, "experts 0, 1 of layer 1 .* 2 groups"),
        ({1: (0, 1, 4), 2: (0, 1, 4)}, "multiple of 2"),
    ],
)
def test_experts_that_cannot_go_are_named(experts: Any, said: str) -> None:
    mixtures = find_mixtures(find_structure(make_mixture("deepseek_v3")))
    mixtures.require({1: (0, 4), 2: (3, 7)})
    mixtures.require({2: (3, 7)}, removed=(1,))
    with pytest.raises(LyapunovPruneError, match=said):
        mixtures.require(experts)


def test_other_models_are_refused_by_name() -> None:
    by_id: Any = make_mixture("mixtral")
    by_id.model.layers[1].mlp.gate.register_buffer("table", torch.zeros(97, 2, dtype=torch.long))
    for model, said in (
        (make_tiny("llama"), "LlamaModel has experts; remove"),
        (make_mixture("zaya", router_hidden_size=9), "router holds"),
        (by_id, "layer 1 sends a token .* for its id"),
        (unequal(make_mixture("mixtral")), "layer 0 has 8 experts and layer 1 has 6"),
        (shared(make_mixture("mixtral")), "layers 0 and 2 share"),
        (unstacked(make_mixture("mixtral")), "layer 1 .*unknown form .*stacked"),
        (unsaid(make_mixture("mixtral")), "how many experts each token takes"),
        (hunyuan([2, 3, 2]), "layers take 2 to 3 experts"),
    ):
        with pytest.raises(LyapunovPruneError, match=said):
            find_mixtures(find_structure(model))


def hunyuan(chosen: list[int]) -> PreTrainedModel:
    small = {**SMALL, "num_hidden_layers": 3, "num_experts": 8}
    return from_settings("hunyuan_v1_moe", **small, moe_topk=chosen)


def test_a_list_with_the_same_number_for_every_layer_is_that_number() -> None:
    assert find_mixtures(find_structure(hunyuan([2, 2, 2]))).router == Router(8, 2)


def unequal(model: PreTrainedModel) -> PreTrainedModel:
    fewer = operated(model, PruningPlan.given(model, ExpertsGone((), dict.fromkeys(range(3), (0, 1)))))
    find_structure(model).layers[1] = find_structure(fewer).layers[1]
    return model


def shared(model: PreTrainedModel) -> PreTrainedModel:
    layers: Any = find_structure(model).layers
    layers[2].mlp.experts = layers[0].mlp.experts
    return model


def unstacked(model: PreTrainedModel) -> PreTrainedModel:
    layers: Any = find_structure(model).layers
    layers[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(8)])
    return model


def unsaid(model: PreTrainedModel) -> PreTrainedModel:
    model.config.num_experts_per_tok = 0
    return model
