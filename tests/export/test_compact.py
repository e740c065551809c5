"""Compact models: attentions gone and blocks merged for real, and every planted fault seen by the gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import digits, edit_json, make_classifier, make_mixture, make_tiny
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    PreTrainedModel,
)

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import cut_by_hooks, verify_compact
from lyapunov_prune.forward.logits import SAME_LIMIT, cached_logits, deviation, last_logits, uncached_logits
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.structure import find_layers, identify
from lyapunov_prune.pruning.gate import GateReport

WIDTH = 32
_GENERATOR = torch.Generator().manual_seed(0)
W, B = 0.2 * torch.randn(WIDTH, WIDTH, generator=_GENERATOR), torch.randn(WIDTH, generator=_GENERATOR)
V = torch.randn(WIDTH, WIDTH, generator=_GENERATOR, dtype=torch.float64)
CUTS = Cuts(attention=(0, 3), merged={1: (W, B), 3: (V, None)})


def verify(model: PreTrainedModel, compact: PreTrainedModel, cuts: Cuts = CUTS, **options: object) -> GateReport:
    """The gate without the process that takes seconds to start: `test_compact_checkpoint` has it."""
    return verify_compact(model, compact, cuts, elsewhere=False, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compact(llama: PreTrainedModel) -> PreTrainedModel:
    """To be copied before it is changed."""
    return make_compact(llama, CUTS)


# What comes out.


def test_every_family_passes_the_gate(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    before = identify(model)
    made = make_compact(model, CUTS)
    report = verify(model, made, batch=ids)
    assert report.passed, f"\n{report}"
    assert identify(model) == before
    assert type(made).__bases__[1] is type(model)
    assert made.config.model_type == f"compact_{model.config.model_type}"


def test_what_loading_fills_in_every_layer_is_filled_without_an_attention_too() -> None:
    """Falcon H1 multiplies by a vector that no file holds, and writes it into the mixer of every layer on loading."""
    model = make_zoo("falcon_h1")
    cuts = Cuts((3,))
    made = make_compact(model, cuts)
    assert verify_compact(model, made, cuts, elsewhere=True).passed
    model.model.layers[2].mamba.mup_vector.mul_(2)
    assert not verify(model, made, cuts).passed


def test_a_backbone_fills_what_only_it_knows() -> None:
    """Gemma 3n's scales its embeddings by its own width, which the model around it does not have."""
    model, cuts = make_zoo("gemma3n_text"), Cuts((3,))
    assert verify_compact(model, make_compact(model, cuts), cuts, elsewhere=True).passed


@pytest.mark.parametrize("name", ["gemma", "mixtral", "olmo2", "phi", "smollm3"])
def test_families_of_the_zoo_pass_the_gate(name: str, ids: torch.Tensor) -> None:
    """The module that stands for the block of a mixture is the user's own matrix."""
    model = make_zoo(name)
    model = model if name == "mixtral" else model.double()  # torch has no grouped kernel of float64
    made = make_compact(model, CUTS)
    report = verify_compact(model, made, CUTS, batch=ids, elsewhere=name == "mixtral")
    assert report.passed, f"\n{report}"
    assert type(made).__bases__[1] is type(model)
    assert_attentions_add_nothing(model, ids)
    model.model.layers[1].self_attn, model.model.layers[2].self_attn = (
        model.model.layers[2].self_attn,
        model.model.layers[1].self_attn,
    )
    assert not verify(model, made, batch=ids).passed


def test_a_mixture_that_was_read_from_files_is_saved_by_its_own_names(tmp_path: Path) -> None:
    """transformers reads its experts under other names, and would save them under these."""
    make_mixture("mixtral").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    cuts = Cuts(attention=(1,))
    report = verify(model, make_compact(model, cuts), cuts)
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_classifiers_pass_the_gate(name: str) -> None:
    model = make_classifier(name)
    made = make_compact(model, CUTS)
    report = verify(model, made)
    assert report.passed, f"\n{report}"
    assert [check.name for check in report.checks][1] == "reloads as saved"  # no cache to check
    assert report.measured_on is not None
    assert report.measured_on.line().endswith(
        f"2 images of random images (all, {report.measured_on.text_hash[:12]}), 8 pixels wide"
    )


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_the_gate_looks_at_the_images_that_it_is_given(name: str) -> None:
    model, images = make_classifier(name), digits()
    made = make_compact(model, CUTS)
    seen: list[torch.Tensor] = []
    made.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    report = verify(model, made, batch=images)
    assert report.passed, f"\n{report}"
    assert any(torch.equal(pixels, images.pixels[:2]) for pixels in seen)
    assert report.measured_on is not None
    assert (report.measured_on.tokens, report.measured_on.images) == (4, True)
    assert images.take([0]).shared_with(report.measured_on) == 1
    assert images.take([2]).shared_with(report.measured_on) == 0


def test_each_kind_of_model_passes_by_its_own_kind_of_data(ids: torch.Tensor, llama: PreTrainedModel) -> None:
    model = make_classifier("vit")
    with pytest.raises(LyapunovPruneError, match="reads images"):
        verify(model, make_compact(model, CUTS), batch=ids)
    with pytest.raises(LyapunovPruneError, match=r"LlamaForCausalLM .*digits"):
        verify(llama, make_compact(llama, CUTS), batch=digits())


def test_what_is_left_of_a_layer(llama: PreTrainedModel, compact: PreTrainedModel) -> None:
    first, second, untouched, fourth = find_layers(compact).layers[:4]
    assert [name for name, _ in first.named_parameters() if not name.startswith("mlp.")] == [
        "post_attention_layernorm.weight"
    ]
    assert isinstance(second.mlp, nn.Linear)
    assert second.mlp.bias is not None
    assert torch.equal(fourth.mlp.weight, V.float())
    assert fourth.mlp.bias is None
    theirs = dict(find_layers(llama).layers[2].named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in untouched.named_parameters())
    assert all(p.data_ptr() != theirs[name].data_ptr() for name, p in untouched.named_parameters())


def test_a_norm_in_the_residual_stream_stays() -> None:
    """OPT-350m has its norms after the addition."""
    model = make_tiny("opt", do_layer_norm_before=False)
    made = make_compact(model, CUTS)
    assert isinstance(find_layers(made).layers[0].self_attn_layer_norm, nn.LayerNorm)
    assert verify(model, made).passed


def assert_attentions_add_nothing(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The compact model and the gate's reference are the model in which modules of these names return zeros."""

    def zero(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (0 * output[0], *output[1:])

    layers = [find_layers(model).layers[i] for i in (0, 3)]
    names = ("self_attn", "attn", "attention")
    named = [next(child for name, child in layer.named_children() if name in names) for layer in layers]
    with torch.no_grad():
        handles = [module.register_forward_hook(zero) for module in named]
        by_name = uncached_logits(model, ids)
        for handle in handles:
            handle.remove()
        assert deviation(uncached_logits(make_compact(model, Cuts((0, 3))), ids), by_name) <= SAME_LIMIT[model.dtype]
        with cut_by_hooks(wrap(model), Cuts((0, 3))):
            assert deviation(uncached_logits(model, ids), by_name) <= SAME_LIMIT[model.dtype]


def test_the_reference_is_that_of_a_module_by_its_name(family: str, ids: torch.Tensor) -> None:
    assert_attentions_add_nothing(make_tiny(family).double(), ids)


def test_one_cut_after_the_other_is_one_cut(llama: PreTrainedModel, compact: PreTrainedModel) -> None:
    half = make_compact(llama, Cuts((3,), {1: CUTS.merged[1]}))
    rest = Cuts((0,), {3: CUTS.merged[3]})
    whole = make_compact(half, rest)
    assert whole.config.cuts == compact.config.cuts
    assert identify(whole) == dataclasses.replace(identify(compact), name=identify(whole).name)
    assert verify(half, whole, rest).passed
    assert verify(llama, whole).passed


def test_generation_goes_through_the_cache(ids: torch.Tensor) -> None:
    made = make_compact(make_tiny("gemma2"), CUTS)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached, anew = (made.generate(ids[:1], use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, anew)
    with torch.no_grad():
        assert len(made(ids[:1], use_cache=True).past_key_values.layers) == 4


def test_a_narrower_model_stays_so(ids: torch.Tensor) -> None:
    model = make_tiny("llama").bfloat16()
    made = make_compact(model, CUTS)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert verify(model, made).passed


def test_a_model_in_training_stays_so(llama: PreTrainedModel) -> None:
    made = make_compact(make_tiny("llama").train(), CUTS)
    assert all(module.training for module in made.modules())
    made(torch.arange(8).unsqueeze(0)).logits.sum().backward()
    assert all(p.grad is not None for p in made.parameters())


# Planted faults.


def old_numbers(compact: PreTrainedModel) -> None:
    """Caches as transformers makes them, and attentions with the numbers of their layers."""
    for index, layer in enumerate(find_layers(compact).layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    compact.model._forward_pre_hooks.clear()


def unfitted_cache(compact: PreTrainedModel) -> None:
    compact.model._forward_pre_hooks.clear()


def swapped(compact: PreTrainedModel) -> None:
    layers = find_layers(compact).layers
    first, second = layers[1].mlp.weight, layers[3].mlp.weight
    layers[1].mlp.weight, layers[3].mlp.weight = second, first


def transposed(compact: PreTrainedModel) -> None:
    matrix = find_layers(compact).layers[1].mlp
    matrix.weight = nn.Parameter(matrix.weight.T.contiguous())


def lost_bias(compact: PreTrainedModel) -> None:
    find_layers(compact).layers[1].mlp.bias.data.zero_()


def other_list(compact: PreTrainedModel) -> None:
    compact.config.cuts = compact.config.cuts[1:] + compact.config.cuts[:1]


def kept_norm(compact: PreTrainedModel) -> None:
    find_layers(compact).layers[0].input_layernorm = nn.LayerNorm(WIDTH)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (old_numbers, "cached decoding"),
        (swapped, "same as skipping"),
        (transposed, "same as skipping"),
        (lost_bias, "same as skipping"),
        (other_list, "reloads as saved"),
        (kept_norm, "fell by what was removed"),
    ],
)
def test_a_planted_fault_fails(llama: PreTrainedModel, fault: Callable[[PreTrainedModel], None], check: str) -> None:
    made = make_compact(llama, CUTS)
    fault(made)
    report = verify(llama, made)
    assert check in [c.name for c in report.checks if not c.passed], f"\n{report}"


def test_with_the_old_numbers_decoding_is_silently_wrong(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    made = make_compact(llama, Cuts((0,)))
    with torch.no_grad():
        right = last_logits(made, ids)
        assert deviation(cached_logits(made, ids), right) < 1e-5
        old_numbers(made)
        assert deviation(cached_logits(made, ids), right) > 0.01
        assert deviation(cached_logits(made, ids, positions=True), right) < 1e-5  # told, it hides


def test_a_cache_of_mixed_windows_is_fitted(ids: torch.Tensor) -> None:
    """Gemma 2 alternates windows: without layer 0's attention the first entry is of another kind."""
    model = make_tiny("gemma2")
    made = make_compact(model, Cuts((0,)))
    unfitted_cache(made)
    assert "cached decoding" in verify(model, made, Cuts((0,))).failure()


def test_a_merge_of_another_layer_than_was_asked_fails(llama: PreTrainedModel) -> None:
    made = make_compact(llama, Cuts(merged={2: (W, B)}))
    assert "same as skipping" in verify(llama, made, Cuts(merged={1: (W, B)})).failure()


def test_files_that_hold_more_are_counted(llama: PreTrainedModel, compact: PreTrainedModel, tmp_path: Path) -> None:
    compact.save_pretrained(tmp_path)
    assert verify(llama, compact, checkpoint=tmp_path).passed
    edit_json(tmp_path / "config.json", cuts=[{"self_attn": "none"}, {}, {}, {}, {}, {}])
    assert "keys on reloading" in verify(llama, compact, checkpoint=tmp_path).failure()


# Bad input.

NAN = torch.full((WIDTH, WIDTH), float("nan"))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (Cuts(), "nothing is removed"),
        (Cuts((6,)), "attention: there is no layer 6"),
        (Cuts((1, 1)), "name each once"),
        (Cuts(merged={-1: (W, None)}), "merged: there is no layer -1"),
        (Cuts((1,), remove=(6,)), "remove: there is no layer 6"),
        (Cuts((1,), remove=(1,)), "layer 1 is removed as a whole"),
        (Cuts((1, 2, 3), remove=(0, 4, 5)), "no attention is left"),
        (Cuts((1,), hidden={2: HiddenMap(W, None)}), "layer 2 has a hidden map"),
        (Cuts(tuple(range(6))), "count positions"),
        (Cuts(merged={1: (W[1:], B)}), r"layer 1 is \(31, 32\) and \(32,\)"),
        (Cuts(merged={1: (W, B[1:])}), r"layer 1 is \(32, 32\) and \(31,\)"),
        (Cuts(merged={1: (NAN, None)}), "NaN .*layer 1"),
        (Cuts(merged={1: (1e300 * V, None)}), "NaN .*torch.float32"),
    ],
)
def test_bad_cuts(llama: PreTrainedModel, cuts: Cuts, message: str) -> None:
    with pytest.raises(LyapunovPruneError, match=message):
        make_compact(llama, cuts)


def test_blocks_that_layers_share_keep_their_attention() -> None:
    model = make_tiny("llama")
    layers: Any = find_layers(model).layers
    layers[3].self_attn.q_proj.weight = layers[2].self_attn.q_proj.weight
    with pytest.raises(LyapunovPruneError, match=r"layers 2 and 3 share self_attn\.q_proj\.weight"):
        make_compact(model, Cuts((1,)))


def test_what_is_gone_cannot_go_again(compact: PreTrainedModel) -> None:
    with pytest.raises(LyapunovPruneError, match="layer 3 no longer has attention"):
        make_compact(compact, Cuts((1, 3)))
    with pytest.raises(LyapunovPruneError, match="layer 3 is merged"):
        make_compact(compact, Cuts(merged={3: (W, None)}))
    with pytest.raises(LyapunovPruneError, match="no attention is left"):
        make_compact(compact, Cuts((1, 2, 4, 5)))


def test_every_attention_of_a_classifier_may_go() -> None:
    model = make_classifier("vit")
    cuts = Cuts(tuple(range(find_layers(model).num_layers)))
    assert verify(model, make_compact(model, cuts), cuts).passed


def test_a_class_that_no_config_leads_to_is_refused() -> None:
    """A checkpoint could not name it."""
    model = BertForMaskedLM(BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    with pytest.raises(LyapunovPruneError, match="BertForMaskedLM"):
        make_compact(model, Cuts((1,)))


def test_an_attention_that_adds_the_state_itself_is_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(LyapunovPruneError, match="BloomAttention of layer 1"):
        make_compact(model, Cuts((1,)))
