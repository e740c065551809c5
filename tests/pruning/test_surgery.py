"""Removal in memory: every listed family passes the gate, and the original is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import LAYERS, TINY, from_settings, make_tiny, operated
from transformers import FalconH1Config, LlamaConfig, PreTrainedModel

from lyapunov_prune import LyapunovPruneError, remove_layers, verify_removal
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.families import FAMILIES, TRUSTED, Family
from lyapunov_prune.models.settings import slice_settings
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import share_memory

# Two apart are removed in other dtypes below, and more sets from every decoder in families/test_families.py.
REMOVALS = {
    "all but the last": list(range(LAYERS - 1)),
    "all but the first": list(range(1, LAYERS)),
}


def test_every_trusted_family_is_tested() -> None:
    assert {find_structure(make_tiny(name)).model_type for name in TINY} == TRUSTED


@pytest.mark.parametrize("removal", list(REMOVALS))
def test_passes_the_gate(family: str, removal: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    pruned = remove_layers(model, REMOVALS[removal])
    report = verify_removal(model, pruned, REMOVALS[removal], ids)
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_passes_the_gate_in_other_dtypes(family: str, dtype: torch.dtype) -> None:
    model = make_tiny(family).to(dtype)
    pruned = remove_layers(model, [1, 4])
    assert pruned.dtype == dtype
    report = verify_removal(model, pruned, [1, 4])
    assert report.passed, f"\n{report}"


def test_the_original_is_untouched(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    config, logits = model.config.to_dict(), model(ids).logits
    pruned = remove_layers(model, [1, 4])
    with torch.no_grad():
        for parameter in pruned.parameters():
            parameter.zero_()
    assert model.config.to_dict() == config
    assert torch.equal(model(ids).logits, logits)
    assert find_structure(model).num_layers == LAYERS


def test_removed_layers_are_not_copied(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    clone = torch.Tensor.clone

    def count(self: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        copied += 0 if self.is_meta else self.numel()
        return clone(self)

    monkeypatch.setattr(torch.Tensor, "clone", count)
    pruned = remove_layers(llama, [0, 1, 2, 3])
    assert copied == sum(t.numel() for t in [*pruned.parameters(), *pruned.buffers()]) < llama.num_parameters()


def test_settings_of_layers_move_with_them() -> None:
    """Gemma 3 mixes sliding and full attention, and reads the config's list while it runs."""
    model = make_tiny("gemma3")
    kinds = list(model.config.layer_types)
    assert len(set(kinds)) == 2
    pruned = remove_layers(model, [0, 1])
    assert list(pruned.config.layer_types) == kinds[2:]
    assert pruned.config.num_hidden_layers == LAYERS - 2
    assert [layer.self_attn.layer_idx for layer in pruned.model.layers] == list(range(LAYERS - 2))


def test_gpt2_folds_the_layer_number_into_its_queries(ids: torch.Tensor) -> None:
    """The planted fault: without the fold the reloaded model computes something else."""
    model = make_tiny("gpt2-inverse-layer")
    assert verify_removal(model, remove_layers(model, [0]), [0], ids).passed
    family = FAMILIES["gpt2"]
    try:
        FAMILIES["gpt2"] = Family()
        report = verify_removal(model, remove_layers(model, [0]), [0], ids)
    finally:
        FAMILIES["gpt2"] = family
    assert not report.passed


def tiny_config(model_type: str, **extra: Any) -> PreTrainedModel:
    return from_settings(
        model_type,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **extra,
    )


def test_an_unlisted_family_that_passes_the_gate_is_handed_out(ids: torch.Tensor) -> None:
    model = tiny_config("olmo2")
    assert "olmo2" not in FAMILIES | dict.fromkeys(TRUSTED)
    assert find_structure(remove_layers(model, [1])).num_layers == 3


def test_an_unlisted_family_that_fails_is_refused_with_the_reason() -> None:
    """The last layer of this family alone has an output bias, which the new last one lacks."""
    with pytest.raises(LyapunovPruneError, match=r"layers\.2\.attention is another"):
        remove_layers(tiny_config("gpt_neox_japanese"), [3])


def test_a_step_becomes_a_list_of_exceptions(ids: torch.Tensor) -> None:
    """Qwen2-MoE's `decoder_sparse_step` would turn sparse layers dense when they move."""
    model = tiny_config("qwen2_moe", decoder_sparse_step=2, num_experts=4, moe_intermediate_size=16)
    pruned = remove_layers(model, [0])
    assert (pruned.config.decoder_sparse_step, pruned.config.mlp_only_layers) == (1, [1])
    assert verify_removal(model, pruned, [0], ids).passed


def sliced(kept: tuple[int, ...], total: int = 8, **settings: Any) -> dict[str, Any]:
    config = LlamaConfig(num_hidden_layers=total)
    for name, value in settings.items():
        setattr(config, name, value)
    slice_settings(config, "num_hidden_layers", kept, total)
    return {name: getattr(config, name) for name in settings}


KEPT = (1, 2, 5, 7)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("kinds", list("abcdefgh"), list("bcfh")),
        ("flags", (1, 1, 0, 1, 1, 0, 1, 0), (1, 0, 0, 0)),
        ("suppressed_tokens", list(range(8)), list(range(8))),
        ("unrelated", [1, 2, 3], [1, 2, 3]),
        ("moe_layers", [1, 3, 5, 7], [0, 2, 3]),
        ("moe_layers", list(range(8)), [0, 1, 2, 3]),  # as long as there are layers, and still indices
        ("mlp_only_layers", [], []),
        ("first_k_dense_replace", 3, 2),
        ("first_k_dense_replace", 0, 0),
        ("num_kv_shared_layers", 3, 2),
    ],
)
def test_what_a_config_says_of_single_layers_follows(name: str, before: Any, after: Any) -> None:
    assert sliced(KEPT, **{name: before}) == {name: after}


def test_a_list_is_of_layers_only_where_the_defaults_of_its_class_are() -> None:
    """A model of two layers has limits of a time step and multipliers that are as many."""
    config = FalconH1Config(num_hidden_layers=2)
    limits, multipliers = config.time_step_limit, config.mlp_multipliers
    assert len(limits) == len(multipliers) == 2
    slice_settings(config, "num_hidden_layers", (1,), 2)
    assert (config.time_step_limit, config.mlp_multipliers, config.num_hidden_layers) == (limits, multipliers, 1)


def test_a_step_and_its_exceptions_become_exceptions() -> None:
    """Sparse are 1, 5 and 7 of eight: every second one but 3."""
    after = sliced(KEPT, decoder_sparse_step=2, mlp_only_layers=[3])
    assert after == {"decoder_sparse_step": 1, "mlp_only_layers": [1]}


def test_overrides_of_single_layers_move_with_them() -> None:
    config = LlamaConfig(num_hidden_layers=4, per_layer_config={1: {"head_dim": 8}, 2: {"head_dim": 16}})
    slice_settings(config, "num_hidden_layers", (0, 2), 4)
    assert [layer.head_dim for layer in config.per_layer_config] == [LlamaConfig().head_dim, 16]


def test_a_hybrid_keeps_a_layer_with_attention() -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    model = tiny_config("qwen3_5_text", layer_types=kinds)
    with pytest.raises(LyapunovPruneError, match="keep one of layers 1, 3"):
        remove_layers(model, [1, 3])
    assert find_structure(remove_layers(model, [1])).num_layers == 3


def places(model: PreTrainedModel) -> set[int]:
    return {p.data_ptr() for p in model.parameters()}


def test_a_shared_cut_is_the_same_model_and_leaves_the_original_alone(family: str) -> None:
    model = make_tiny(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for plan in (PruningPlan.given(model, gone) for gone in ([1], [0, 3])):
        alone, shared = operated(model, plan), operated(model, plan, shared=True)
        mine = dict(shared.named_parameters())
        assert all(torch.equal(p, mine[name]) for name, p in alone.named_parameters())
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert not places(alone) & places(model)
        if family != "gpt2-inverse-layer":  # whose removal changes weights
            assert places(shared) <= places(model)


@pytest.mark.parametrize("name", ["diffllama", "gpt2"])
def test_a_family_whose_weights_change_gets_its_own(name: str) -> None:
    model = make_tiny("gpt2-inverse-layer") if name == "gpt2" else make_zoo(name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    alone, shared = (
        operated(model, PruningPlan.given(model, [1])),
        operated(model, PruningPlan.given(model, [1]), shared=True),
    )
    assert all(torch.equal(*pair) for pair in zip(alone.parameters(), shared.parameters(), strict=True))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert places(shared) - places(model)


def test_what_is_the_same_is_shared_and_nothing_else(family: str) -> None:
    """Of another value, or of another sign of zero, is not the same."""
    model = make_tiny(family)
    find_structure(model).layers[3].get_parameter(_matrices(model)[1]).data[0, 0] = 0.0
    plan = PruningPlan.given(model, [1])
    pruned = operated(model, plan)
    changed, signed = (find_structure(pruned).layers[2].get_parameter(name) for name in _matrices(model)[:2])
    changed.data[0, 0] += 0.5
    signed.data[0, 0] = -0.0
    before = {name: p.detach().clone() for name, p in pruned.named_parameters()}
    share_memory(pruned, wrap(model), plan)
    assert all(torch.equal(p, before[name]) for name, p in pruned.named_parameters())
    assert signed[0, 0].signbit()
    apart = {name for name, p in pruned.named_parameters() if p.data_ptr() not in places(model)}
    path = find_structure(model).layers_path
    assert {f"{path}.2.{name}" for name in _matrices(model)[:2]} <= apart
    assert len(apart) <= 2 or family == "gpt2-inverse-layer"  # whose removal changes weights


def _matrices(model: PreTrainedModel) -> list[str]:
    return [name for name, p in find_structure(model).layers[3].named_parameters() if p.ndim == 2]


def ties(model: PreTrainedModel) -> dict[str, Any]:
    return {name: vars(m)["_tied_weights_keys"] for name, m in model.named_modules() if "_tied_weights_keys" in vars(m)}


def test_ties_between_layers_are_named_by_the_new_numbers() -> None:
    model = make_zoo("zamba")
    pruned = operated(model, PruningPlan.given(model, [1]))
    fresh = type(pruned)(pruned.config)
    assert ties(pruned) == ties(fresh) != ties(model)
    assert pruned.all_tied_weights_keys == fresh.all_tied_weights_keys
