"""The parts of a decoder are found by rule, encoders are refused, and a model knows itself again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from families.zoo import make_zoo
from helpers import LAYERS, TINY, make_tiny
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import find_structure, identify, require_causal

Make = Callable[..., PreTrainedModel]


def make_bert(is_decoder: bool) -> PreTrainedModel:
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=is_decoder,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


# Where things are.


def test_the_layers_are_found_in_every_family(family: str, tiny: Make) -> None:
    model = tiny(family)
    structure = find_structure(model)
    assert structure.num_layers == LAYERS
    assert model.get_submodule(structure.layers_path) is structure.layers
    assert structure.model_type == TINY[family][0]
    assert structure.config.num_hidden_layers == LAYERS


def test_names_say_the_layer_and_are_renewed_when_layers_are_removed() -> None:
    structure = find_structure(make_tiny("llama"))
    up = "mlp.up_proj.weight"
    names = (
        f"model.layers.4.{up}",
        "model.layers.4",
        "model.layers.1.x",
        "model.embed_tokens.weight",
        f"layers.4.{up}",
    )
    assert [structure.layer_of(name) for name in names] == [4, 4, 1, None, None]
    renamed = [structure.renamed(name, (0, 2, 4, 5)) for name in names]
    assert renamed == [f"model.layers.2.{up}", "model.layers.2", None, *names[3:]]


def test_the_layers_are_all_that_runs_between_embedding_and_norm(family: str, tiny: Make, ids: torch.Tensor) -> None:
    structure = find_structure(tiny(family))
    ran: list[int] = []
    for index, layer in enumerate(structure.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    structure.backbone(input_ids=ids, use_cache=False)
    assert ran == list(range(LAYERS))


def test_the_backbone_holds_the_layers_and_not_the_head(family: str, tiny: Make, ids: torch.Tensor) -> None:
    model = tiny(family)
    structure = find_structure(model)
    assert structure.layers in structure.backbone.modules()
    assert structure.backbone(input_ids=ids, use_cache=False)[0].shape == (3, 40, 32)


def test_the_longest_context_is_the_config_s(family: str, tiny: Make) -> None:
    assert find_structure(tiny(family)).max_context == 128


def test_the_context_of_whisper_has_another_name() -> None:
    model = make_zoo("whisper")
    assert find_structure(model).max_context == model.config.max_target_positions


def test_the_largest_list_of_the_right_length_wins(tiny: Make) -> None:
    model = tiny("llama")
    model.model.extras = nn.ModuleList(nn.Linear(1, 1) for _ in range(LAYERS))
    assert find_structure(model).layers_path == "model.layers"


def test_the_decoder_of_an_encoder_decoder_counts_its_own_layers() -> None:
    """In a BART config `num_hidden_layers` is the number of encoder layers."""
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=48
    )
    config.is_encoder_decoder = False
    found = find_structure(transformers.BartForCausalLM(config))
    assert (found.num_layers, found.count, found.layers_path) == (3, "decoder_layers", "model.decoder.layers")


# What is refused.


def test_layers_in_separate_lists_are_refused(tiny: Make) -> None:
    """XLM keeps attentions and feed-forwards apart: there is no layer to skip, measure or remove."""
    model = tiny("llama")
    model.model.attentions = nn.ModuleList(nn.Linear(32, 128) for _ in range(LAYERS))
    with pytest.raises(LyapunovPruneError, match=r"model\.layers, model\.attentions"):
        find_structure(model)


def test_a_model_without_a_list_of_its_layers_is_refused(tiny: Make) -> None:
    model = tiny("llama")
    model.config.num_hidden_layers = LAYERS + 1
    with pytest.raises(LyapunovPruneError, match=r"LlamaForCausalLM .*7 layers"):
        find_structure(model)


def test_a_model_without_a_head_is_refused(tiny: Make) -> None:
    with pytest.raises(LyapunovPruneError, match="LlamaModel"):
        find_structure(tiny("llama").model)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(LyapunovPruneError, match="T5ForConditionalGeneration"):
        find_structure(transformers.T5ForConditionalGeneration(config))


def test_an_encoder_with_another_head_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="encoder"):
        find_structure(transformers.BertForMaskedLM(make_bert(is_decoder=False).config))


def test_an_encoder_is_refused() -> None:
    with pytest.raises(LyapunovPruneError, match="BertLMHeadModel"):
        require_causal(make_bert(is_decoder=False))


def test_the_same_network_as_a_decoder_is_accepted() -> None:
    require_causal(make_bert(is_decoder=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_family_is_causal_in_every_dtype(family: str, dtype: torch.dtype, tiny: Make) -> None:
    require_causal(tiny(family).to(dtype))


def test_a_causal_model_with_nan_is_no_encoder(tiny: Make) -> None:
    """Its fault is another one, and the measurement names the layer."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.fill_(float("nan"))
    require_causal(model)


# Which model it is.


def test_a_model_is_itself(family: str, tiny: Make) -> None:
    assert identify(tiny(family)).same_as(identify(tiny(family)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_is_itself_in_another_dtype(family: str, dtype: torch.dtype, tiny: Make) -> None:
    model = tiny(family)
    before = identify(model)
    assert identify(model.to(dtype)).same_as(before)


def test_a_model_with_nan_is_itself(tiny: Make) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[3].self_attn.q_proj.weight.fill_(float("nan"))
    assert identify(model).same_as(identify(copy.deepcopy(model)))


def test_a_random_twin_is_another_model(family: str, tiny: Make) -> None:
    assert not identify(tiny(family)).same_as(identify(tiny(family, seed=1)))


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": LAYERS - 1}, {"intermediate_size": 64}, {"vocab_size": 98}], ids=str
)
def test_other_sizes_are_another_model(change: dict[str, int], tiny: Make) -> None:
    assert not identify(tiny("llama")).same_as(identify(tiny("llama", **change)))


def test_another_architecture_is_another_model(tiny: Make) -> None:
    found = identify(tiny("gpt2"))
    assert not found.same_as(replace(found, architecture=identify(tiny("opt")).architecture))


def test_one_retrained_layer_is_another_model(family: str, tiny: Make) -> None:
    model = tiny(family)
    before = identify(model)
    with torch.no_grad():
        for parameter in find_structure(model).layers[-1].parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    assert not identify(model).same_as(before)


def test_the_identity_counts_layers_and_parameters(family: str, tiny: Make) -> None:
    model = tiny(family)
    found = identify(model)
    assert (found.num_layers, found.parameters) == (LAYERS, sum(p.numel() for p in model.parameters()))


def test_outputs_without_names_are_refused() -> None:
    model = make_tiny("llama")
    model.config.return_dict = False
    with pytest.raises(LyapunovPruneError, match=r"config\.return_dict"):
        find_structure(model)
