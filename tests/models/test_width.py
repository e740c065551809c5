"""Which models have channels that can leave, how their matrices come apart, and the true reason where they cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from families.zoo import CHANGES, settings_of
from helpers import make_mixture, make_tiny, with_large_weights
from helpers.tiny_models import SMALL, from_settings
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lyapunov_prune import LyapunovPruneError, remove_layers, verify_removal
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.units import Unit
from lyapunov_prune.models.width import Width, find_width
from lyapunov_prune.pruning.width import choose_channels

EXPERTS: dict[str, Any] = {**SMALL, "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2}


def width_of(family: str, **settings: Any) -> Width:
    return find_width(wrap(from_settings(family, **{**EXPERTS, **settings})))


def units(width: Width, layer: int) -> list[Unit]:
    return [unit for unit in width.units[layer] if unit is not None]


@pytest.mark.parametrize(
    ("family", "setting", "times"),
    [("llama", "intermediate_size", 1), ("gpt2", "n_inner", 1), ("recurrent_gemma", "intermediate_size", 2)],
)
def test_the_setting_of_a_dense_model(family: str, setting: str, times: int) -> None:
    width = width_of(family)
    assert (width.setting.name, width.setting.times) == (setting, times)
    assert [len(here) for here in width.units] == [1] * len(width.units)


def test_the_dense_block_of_a_granite_hybrid_has_a_setting_of_its_own() -> None:
    config = CONFIG_MAPPING["granitemoehybrid"]
    settings = settings_of(config, CHANGES["granitemoehybrid"]) | {"num_local_experts": 0, "num_experts_per_tok": 0}
    model = with_large_weights(AutoModelForCausalLM.from_config(config(**settings)).eval())
    width = find_width(wrap(model))
    assert (width.setting.name, width.width, units(width, 0)[0].fused) == ("shared_intermediate_size", 16, True)
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    plan = choose_channels(model, ids, 0.5)
    assert verify_removal(model, remove_layers(model, plan), plan, ids).passed


@pytest.mark.parametrize(("family", "interleaved"), [("mixtral", False), ("gpt_oss", True), ("phi3", False)])
def test_how_gate_and_up_come_apart_is_tried(family: str, interleaved: bool) -> None:
    assert {unit.interleaved for unit in units(width_of(family), 0)} == {interleaved}


def test_what_another_setting_gives_its_width_keeps_its_channels() -> None:
    """A dense layer and a shared expert of settings of their own; and one whose width that of the experts gives."""
    own = width_of("qwen2_moe", moe_intermediate_size=16, shared_expert_intermediate_size=24, mlp_only_layers=[1])
    assert [len(units(own, layer)) for layer in (0, 1)] == [2, 0]
    assert [len(own.units[layer]) for layer in (0, 1)] == [3, 1]
    shared = find_width(wrap(make_mixture("deepseek_v3", n_shared_experts=3)))
    assert [unit.width for unit in units(shared, 1)] == [*[16] * 8, 48]
    assert (shared.width, units(shared, 0)) == (16, [])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "no layer .* names that are known"),
        ("bloom", "no setting .* counts the 128 hidden channels"),
        ("bitnet", "gives .*ffn_sub_norm.weight its size too"),
    ],
)
def test_others_are_refused_with_the_reason(family: str, reason: str) -> None:
    with pytest.raises(LyapunovPruneError) as caught:
        width_of(family)
    assert re.search(reason, caught.value.message)


def test_channels_that_depend_on_each_other_are_refused() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(-1, keepdim=True)

    model = make_tiny("llama")
    wrap(model).layers[0].mlp.act_fn = Centred()
    with pytest.raises(LyapunovPruneError, match="one by one"):
        find_width(wrap(model))


def test_blocks_of_several_widths_are_refused() -> None:
    model, wider = make_tiny("llama"), make_tiny("llama", intermediate_size=56)
    wrap(model).layers[2].mlp = wrap(wider).layers[2].mlp
    with pytest.raises(LyapunovPruneError, match="24 of 56 channels"):
        find_width(wrap(model))


def test_blocks_that_layers_share_are_refused() -> None:
    model = make_tiny("llama")
    wrap(model).layers[2].mlp = wrap(model).layers[1].mlp
    with pytest.raises(LyapunovPruneError, match="layers 1 and 2 share"):
        find_width(wrap(model))
