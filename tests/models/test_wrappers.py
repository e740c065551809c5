"""Models that are more, or less, than their plain weights: multimodal ones, adapters, quantised, dispatched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from helpers import LAYERS, SMALL, TEXT, Done, make_tiny
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import (
    LyapunovPruneError,
    PruningPlan,
    allocate,
    block_influence,
    check_bounds,
    compress,
    heal,
    load,
    measure_contraction,
    measure_sensitivity,
    remove_layers,
    verify_removal,
)
from lyapunov_prune.bounds import approximate
from lyapunov_prune.export.gguf_whole import write_gguf
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.pictures import picture_logits, picture_prompt
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.models.wrappers import loading_class
from lyapunov_prune.profiles import sublayer_influence
from lyapunov_prune.pruning.width import choose_channels

DEPTH = 4
_TEXT: dict[str, Any] = {**SMALL, "num_hidden_layers": DEPTH}
_IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
_MROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}
_QWEN_IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def text(model_type: str, **extra: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_TEXT, **extra}


# Class of the model -> its config.
WRAPPERS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": text("gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2),
        "vision_config": {"model_type": "siglip_vision_model", **_IMAGE},
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": text("llama"),
        "vision_config": {"model_type": "clip_vision_model", **_IMAGE},
        "image_token_index": 90,
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "text_config": text("mistral"),
        "vision_config": {"model_type": "pixtral", **_IMAGE, "head_dim": 8},
        "image_token_index": 90,
    },
    "Idefics3ForConditionalGeneration": {
        "model_type": "idefics3",
        "text_config": text("llama"),
        "vision_config": {"model_type": "idefics3_vision", **_IMAGE},
        "image_token_id": 90,
        "scale_factor": 2,
    },
    "InternVLForConditionalGeneration": {
        "model_type": "internvl",
        "text_config": text("qwen2"),
        "vision_config": {"model_type": "internvl_vision", **_IMAGE, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 90,
    },
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "text_config": text("qwen2_vl_text", rope_scaling=_MROPE),
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "mlp_ratio": 2,
        },
        **_QWEN_IDS,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "text_config": text("qwen2_5_vl_text", rope_scaling=_MROPE),
        "vision_config": {"model_type": "qwen2_5_vl", **_TOWER, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": text("qwen3_vl_text", rope_scaling={**_MROPE, "mrope_interleaved": True}),
        "vision_config": {
            "model_type": "qwen3_vl",
            **_TOWER,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **_QWEN_IDS,
    },
    "Qwen2AudioForConditionalGeneration": {
        "model_type": "qwen2_audio",
        "text_config": text("qwen2"),
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
    },
    "Llama4ForConditionalGeneration": {
        "model_type": "llama4",
        "text_config": text(
            "llama4_text",
            num_local_experts=2,
            intermediate_size_mlp=48,
            attention_chunk_size=16,
            moe_layers=[1, 3],
        ),
        "vision_config": {
            "model_type": "llama4_vision_model",
            **_IMAGE,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "image_token_index": 90,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
}
# Its list of four projectors is as long as the decoders above have layers.
GRANITE: dict[str, Any] = {
    "model_type": "granite4_vision",
    "text_config": text("granite4_vision_text", num_hidden_layers=DEPTH + 2),
    "vision_config": {
        "model_type": "clip_vision_model",
        **_IMAGE,
        "hidden_size": 64,
        "image_size": 32,
        "patch_size": 8,
    },
    "qformer_config": {
        "model_type": "blip_2_qformer",
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "cross_attention_frequency": 1,
        "max_position_embeddings": 64,
        "use_qformer_text_input": False,
    },
    "deepstack_layer_map": [(1, 0)],
    "spatial_target_layers": [4, 5],
    "downsample_rate": "1/2",
    "image_token_index": 90,
    "image_grid_pinpoints": [[32, 32]],
}
# Refused, and why.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "PaliGemmaForConditionalGeneration": (
        {
            "model_type": "paligemma",
            "text_config": text("gemma"),
            "vision_config": {"model_type": "siglip_vision_model", **_IMAGE},
            "image_token_index": 90,
            "projection_dim": 32,
        },
        "looks at later tokens",
    ),
    "MllamaForConditionalGeneration": (
        {
            "model_type": "mllama",
            "text_config": text("mllama_text_model", cross_attention_layers=[1]),
            "vision_config": {
                "model_type": "mllama_vision_model",
                **_IMAGE,
                "num_global_layers": 1,
                "attention_heads": 2,
                "vision_output_dim": 32,
                "intermediate_layers_indices": [0],
            },
            "image_token_index": 90,
        },
        r"layers 1 of MllamaForConditionalGeneration run only when there is an image.*not supported",
    ),
    "Blip2ForConditionalGeneration": (
        {
            "model_type": "blip-2",
            "text_config": text("opt", ffn_dim=48, word_embed_proj_dim=32),
            "vision_config": {"model_type": "blip_2_vision_model", **_IMAGE},
            "qformer_config": {"model_type": "blip_2_qformer", **_IMAGE, "encoder_hidden_size": 16},
        },
        "does not run on text only",
    ),
}


def make_wrapped(kind: str) -> PreTrainedModel:
    return made(kind, WRAPPERS[kind] if kind in WRAPPERS else REFUSED[kind][0])


def made(kind: str, described: dict[str, Any]) -> PreTrainedModel:
    described = dict(described)
    config = transformers.AutoConfig.for_model(described.pop("model_type"), **described)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def outside(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor that belongs to no decoder layer."""
    path = find_structure(model).layers_path
    return {name: t for name, t in model.state_dict().items() if not name.startswith(f"{path}.")}


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_a_decoder_inside_a_multimodal_model(kind: str, ids: torch.Tensor) -> None:
    model, ids = make_wrapped(kind), ids % 90
    assert len(block_influence(model, ids).influence) == DEPTH
    assert len(sublayer_influence(model, ids).mlp) == DEPTH
    plan = PruningPlan.given(model, [1, 2])
    pruned = remove_layers(model, plan)
    assert type(pruned) is type(model)
    report = verify_removal(model, pruned, plan, ids)
    assert report.passed, f"\n{report}"
    before, after = outside(model), outside(pruned)
    assert before.keys() == after.keys()
    assert any("vis" in name or "audio" in name for name in before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.fixture
def saved_whole(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[[str], Path]:
    """Saves a wrapped decoder that reads the words of `tokenizer`."""

    def save(kind: str) -> Path:
        described = dict(WRAPPERS[kind] if kind in WRAPPERS else REFUSED[kind][0])
        described["text_config"] = {**described["text_config"], "vocab_size": len(tokenizer)}
        made(kind, described).save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.mark.parametrize(
    "kind",
    ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration"],
)
def test_commands_take_the_language_layers_out_of_the_whole(
    kind: str, saved_whole: Callable[[str], Path], tmp_path: Path, run: Callable[..., Done]
) -> None:
    folder, out = saved_whole(kind), tmp_path / "out"
    some = ["--tokens", "64", "--context", "16"]
    for command, *options in (["profile"], ["rank"], ["prune", "--layers", "1"]):
        target = out if command == "prune" else tmp_path / command
        done = run(command, str(folder), *options, *some, "-o", str(target))
        assert done.code == 0, done
    plain, whole = (getattr(transformers, kind).from_pretrained(place).eval() for place in (out, folder))
    assert plain.config.text_config.num_hidden_layers == DEPTH - 1
    before, after = outside(whole), outside(plain)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    prompt = picture_prompt(whole)
    assert prompt is not None
    with torch.no_grad(), skipped(find_structure(whole), (1,)):
        torch.testing.assert_close(picture_logits(plain, prompt), picture_logits(whole, prompt))


@pytest.mark.parametrize("kind", ["Blip2ForConditionalGeneration", "PaliGemmaForConditionalGeneration"])
def test_a_saved_wrapper_that_text_cannot_check_is_refused(kind: str, saved_whole: Callable[[str], Path]) -> None:
    with pytest.raises(LyapunovPruneError, match=REFUSED[kind][1]):
        load(saved_whole(kind))


@pytest.mark.parametrize("kind", [kind for kind in WRAPPERS if "Audio" not in kind])
def test_a_picture_is_put_into_a_prompt(kind: str) -> None:
    model = make_wrapped(kind)
    prompt = picture_prompt(model)
    assert prompt is not None
    logits, other = (
        picture_logits(model, prompt | {"pixel_values": scale * prompt["pixel_values"]}).detach() for scale in (1, 2)
    )
    assert logits.isfinite().all()
    assert not torch.equal(logits[:, -1], other[:, -1])


@pytest.mark.parametrize("kind", ["Qwen2AudioForConditionalGeneration", "MllamaForConditionalGeneration"])
def test_where_no_picture_fits_there_is_none(kind: str) -> None:
    assert picture_prompt(make_wrapped(kind)) is None


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_wrapper_that_text_cannot_check_is_refused(kind: str) -> None:
    with pytest.raises(LyapunovPruneError, match=REFUSED[kind][1]) as error:
        remove_layers(make_wrapped(kind), [2])
    assert "\n" not in str(error.value)


def test_a_layer_that_text_does_not_run_has_no_score(ids: torch.Tensor) -> None:
    scores = sublayer_influence(make_wrapped("MllamaForConditionalGeneration"), ids % 90)
    for values in (scores.attention, scores.mlp):
        assert values.shape == (DEPTH,)
        assert [layer for layer in range(DEPTH) if values[layer] != values[layer]] == [1]


def test_a_layer_that_takes_in_a_level_of_the_image_stays() -> None:
    """Qwen3-VL adds a feature of the image after each of its first layers, by number."""
    model = make_wrapped("Qwen3VLForConditionalGeneration")
    with pytest.raises(LyapunovPruneError, match="first 1,"):
        remove_layers(model, [0, 2])
    remove_layers(model, [2])


def test_with_an_image_too_the_layers_are_as_skipped(ids: torch.Tensor) -> None:
    """What the gate cannot see, it compares on text, shown once: the image enters before layer 0."""
    model = make_wrapped("LlavaForConditionalGeneration")
    ids = ids % 90
    ids[:, 5:9] = 90
    inputs = {"input_ids": ids, "pixel_values": torch.randn(len(ids), 3, 28, 28), "use_cache": False}
    with skipped(find_structure(model), (1, 2)):
        expected = model(**inputs).logits
    assert not torch.allclose(model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits, expected, atol=0.1)
    torch.testing.assert_close(remove_layers(model, [1, 2])(**inputs).logits, expected)


def test_features_of_the_image_follow_the_layers_they_enter() -> None:
    """Granite 4 Vision numbers them in the outer config; text does not see it, and neither does the gate."""
    model: Any = made("Granite4VisionForConditionalGeneration", GRANITE).double()
    inputs = {
        "input_ids": torch.tensor([[5, 6, *[90] * 10, 7, 8]]),
        "pixel_values": torch.randn(1, 2, 3, 32, 32, dtype=torch.float64),
        "image_sizes": torch.tensor([[32, 32]]),
    }
    with skipped(find_structure(model), (1, 2)):
        expected = model(**inputs).logits
    pruned: Any = remove_layers(model, [1, 2])
    assert (pruned.config.deepstack_layer_map, pruned.config.spatial_target_layers) == ([(1, 0)], [2, 3])
    torch.testing.assert_close(pruned(**inputs).logits, expected)
    pruned.config.spatial_target_layers = [1, 2]  # the planted fault: other numbers
    assert not torch.allclose(pruned(**inputs).logits, expected, atol=1e-3)
    for removed, kept in ([5], 5), ([4], 4), ([0, 1, 2, 3], 0):
        with pytest.raises(LyapunovPruneError, match=f"keep layer {kept}"):
            remove_layers(model, removed)


def test_planted_fault_a_change_in_a_wrapped_layer(ids: torch.Tensor) -> None:
    model = make_wrapped("LlavaForConditionalGeneration")
    pruned: Any = remove_layers(model, [1])
    with torch.no_grad():
        pruned.model.language_model.layers[1].mlp.down_proj.weight[0] += 1
    assert "same as skipping" in verify_removal(model, pruned, [1], ids % 90).failure()


def test_a_wrapper_is_written_and_its_card_names_its_class(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_wrapped("LlavaForConditionalGeneration")
    write_pruned(model, tokenizer, PruningPlan.given(model, [1]), tmp_path / "out")
    assert "model = LlavaForConditionalGeneration.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert find_structure(again).num_layers == DEPTH - 1
    assert type(load(tmp_path / "out").model) is type(model)


@pytest.mark.parametrize("kind", ["Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_a_wrapper_is_no_gguf_file(kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="pictures or sound"):
        write_gguf(wrap(make_wrapped(kind)), tokenizer, tmp_path / "x.gguf")


def test_a_class_of_ones_own_must_load_with_the_automatic_class(llama: PreTrainedModel) -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    assert loading_class(llama) is loading_class(Mine(llama.config)) is AutoModelForCausalLM
    assert loading_class(make_wrapped("LlavaForConditionalGeneration")) is transformers.LlavaForConditionalGeneration


# Adapters.


def with_adapters(model: PreTrainedModel) -> Any:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_alpha=8))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


def test_attached_adapters_are_refused(ids: torch.Tensor) -> None:
    adapted = with_adapters(make_tiny("llama"))
    others = (lambda model, _: find_projections(wrap(model)), lambda model, _: choose_channels(model, ids, 0.5))
    for refused in (remove_layers, *others):
        for model in (adapted, adapted.base_model.model):
            with pytest.raises(LyapunovPruneError, match="adapters are attached") as error:
                refused(model, [1])
            assert "\n" not in str(error.value)


def test_adapters_attached_by_transformers_are_refused() -> None:
    model = make_tiny("llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(LyapunovPruneError, match="adapters are attached"):
        remove_layers(model, [1])


@pytest.fixture
def adapters(checkpoint: Path) -> Path:
    """A folder with adapters for the model in `tiny`, beside it."""
    adapted = with_adapters(AutoModelForCausalLM.from_pretrained(checkpoint))
    adapted.save_pretrained(checkpoint.parent / "adapters")
    return checkpoint.parent / "adapters"


def test_a_folder_of_adapters(adapters: Path, run: Callable[..., Any], ids: torch.Tensor) -> None:
    done = run("prune", "adapters", "--layers", "1", "--device", "disk", "-o", "out")
    assert (done.code, done.changed, "holds adapters for" in done.err) == (2, set(), True)
    done = run("prune", "adapters", "--layers", "1", "-o", "out", *TEXT)
    assert (done.code, "added to the weights of" in done.err) == (0, True)
    merged = load(adapters).model
    expected = remove_layers(merged, [1])(ids).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained("out")(ids).logits, expected)
    assert not torch.allclose(remove_layers(load("tiny").model, [1])(ids).logits, expected, atol=0.1)


def test_adapters_that_cannot_be_merged_are_refused(adapters: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="on one device"):
        load(adapters, device="spread")
    (adapters / "adapter_model.safetensors").rename(adapters / "adapter_model.bin")
    with pytest.raises(LyapunovPruneError, match=r"adapter_model.safetensors"):
        load(adapters)
    (adapters / "adapter_model.bin").rename(adapters / "adapter_model.safetensors")
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(LyapunovPruneError, match="cannot load"):
        load(adapters)


def kept_if(keep: Callable[[int], bool]) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if keep(i)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (kept_if(lambda i: i != 3), "1 tensors missing, 0"),
        (kept_if(lambda i: i % 3 == 0), "16 tensors missing, 0"),
        (kept_if(lambda i: False), "24 tensors missing, 0"),
        (
            lambda tensors: {name.replace("q_proj", "k_proj"): t for name, t in tensors.items()},
            "12 tensors missing, 12",
        ),
        (lambda tensors: tensors | {"base_model.model.x.lora_A.weight": torch.zeros(1)}, "0 .*missing, 1 "),
        (lambda tensors: {name: t[:1] for name, t in tensors.items()}, "cannot be merged"),
    ],
    ids=["one missing", "most missing", "empty", "renamed", "one more", "wrong shape"],
)
def test_adapters_that_lack_a_tensor_are_not_made_up(
    change: Callable[..., dict[str, torch.Tensor]], message: str, adapters: Path, run: Callable[..., Any]
) -> None:
    file = adapters / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(LyapunovPruneError, match=message):
        load(adapters)
    done = run("prune", "adapters", "--layers", "1", "-o", "out", *TEXT)
    assert (done.code, done.changed, done.err.count("\n")) == (2, set(), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj"]}, "0 tensors missing, 12"),
        ({"target_modules": ["q_proj", "down_proj", "up_proj"]}, "12 tensors missing, 0"),
        ({"peft_type": "XLORA"}, "XLORA"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
    ],
    ids=str,
)
def test_adapters_that_do_not_fit_their_config_are_refused(
    changes: dict[str, Any], message: str, adapters: Path
) -> None:
    config = json.loads((adapters / "adapter_config.json").read_text())
    (adapters / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(LyapunovPruneError, match=message):
        load(adapters)


def test_a_folder_of_adapters_without_their_tensors_is_refused(adapters: Path) -> None:
    (adapters / "adapter_model.safetensors").rename(adapters / "adapter_model.bin")
    with pytest.raises(LyapunovPruneError, match=r"hold no adapter_model\.safetensors"):
        load(adapters)


def test_a_folder_of_adapters_is_merged_as_peft_merges_it(adapters: Path, checkpoint: Path) -> None:
    wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), str(adapters))
    state = wanted.merge_and_unload(safe_merge=True).state_dict()
    found = load(adapters).model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_adapter_in_the_folder_of_a_model_is_not_picked_up_silently(adapters: Path, checkpoint: Path) -> None:
    shutil.copy(adapters / "adapter_config.json", checkpoint)
    with pytest.raises(LyapunovPruneError, match="holds adapters"):
        load(checkpoint)


# Quantised.


@pytest.mark.parametrize(
    ("packed", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised (gptq)"),
        ({"quant_method": "awq", "bits": 4}, "quantised (awq)"),
        ({"quant_method": "mine"}, "quantised (mine)"),
        ({"bits": 4}, "an unnamed method"),
        ({"quant_method": "fp8"}, "quantised (fp8)"),
        ({"quant_method": "compressed-tensors"}, "quantised (compressed-tensors)"),
    ],
    ids=["gptq", "awq", "unknown", "unnamed", "fp8", "compressed-tensors"],
)
def test_a_quantised_checkpoint_is_refused_before_it_is_loaded(
    packed: dict[str, Any], told: str, checkpoint: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": packed}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # nothing is loaded
    done = run("compress", "tiny", "--sparsity", "0.5", "-o", "out", *TEXT)
    assert (done.code, done.changed, done.err.count("\n")) == (2, set(), 1)
    assert told in done.err
    assert "original weights, or a GGUF" in done.err


def test_a_quantised_model_in_memory_is_refused() -> None:
    model = make_tiny("llama")
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(LyapunovPruneError, match=r"quantised \(bitsandbytes\)"):
        remove_layers(model, [1])


# Dispatched by accelerate.

DEVICES = {
    "model.embed_tokens": "cpu",
    **{f"model.layers.{i}": "cpu" for i in range(LAYERS)},
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def test_a_dispatched_model_in_memory(ids: torch.Tensor) -> None:
    plain = make_tiny("llama")
    model: Any = dispatch_model(make_tiny("llama"), DEVICES, force_hooks=True)
    assert hasattr(model.model.layers[1], "_hf_hook")
    assert str(block_influence(model, ids).to_frame()) == str(block_influence(plain, ids).to_frame())
    assert len(measure_contraction(model, ids, seeds=(0,)).rho) == LAYERS
    plan = PruningPlan.given(model, [1, 4])
    pruned: Any = remove_layers(model, plan)
    report = verify_removal(model, pruned, plan, ids)
    assert report.passed, f"\n{report}"
    assert torch.equal(pruned(ids).logits, remove_layers(plain, plan)(ids).logits)
    layers = [name for name in pruned.hf_device_map if ".layers." in name]
    assert layers == [f"model.layers.{i}" for i in range(LAYERS - 2)]
    assert model.hf_device_map == DEVICES
    mine, theirs = set(map(id, pruned.modules())), set(map(id, model.modules()))
    assert not mine & theirs
    for module in pruned.modules():  # accelerate's forward is bound to the module that it was put on
        wrapped = vars(module).get("forward")
        assert wrapped is None or (wrapped.args[0] is module and module._old_forward.__self__ is module)


def test_a_module_with_a_base_layer_of_its_own_is_no_adapter() -> None:
    model: Any = make_tiny("llama")
    model.model.layers[0].mlp.base_layer = nn.Identity()
    assert find_projections(wrap(model))


# Weights that are made of others at every forward.


class Halved(nn.Module):
    def forward(self, W: torch.Tensor) -> torch.Tensor:
        return W / 2


PARAMETRISED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "the older weight_norm": nn.utils.weight_norm,
    "the older spectral_norm": nn.utils.spectral_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.3),
    "orthogonal": parametrizations.orthogonal,
    "one of the user's": lambda module: register_parametrization(module, "weight", Halved()),
}
WRITERS: dict[str, Callable[[PreTrainedModel, torch.Tensor], Any]] = {
    "compress": lambda model, ids: compress(model, method="magnitude", sparsity=0.5),
    "compress by activations": lambda model, ids: compress(model, ids, method="wanda", sparsity=0.5),
    "allocate": lambda model, ids: allocate(model, "uniform", 0.5),
    "approximate": lambda model, ids: approximate(model, {}).__enter__(),
    "check_bounds": lambda model, ids: check_bounds(model, ids, sparsity=0.5),
    "heal": lambda model, ids: heal(model, make_tiny("llama"), ids, steps=1),
    "remove_layers": lambda model, ids: remove_layers(model, [1]),
    "measure_sensitivity": lambda model, ids: measure_sensitivity(model, ids, studies=["layer"]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", PARAMETRISED)
def test_weights_made_of_others_are_refused(kind: str, ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    PARAMETRISED[kind](model.model.layers[2].mlp.down_proj)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, write in WRITERS.items():
        with pytest.raises(LyapunovPruneError, match=r"layers\.2\.mlp\.down_proj\.weight") as error:
            write(model, ids)
        assert "\n" not in str(error.value), name
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    block_influence(model, ids)  # which writes nothing


def test_once_they_are_parameters_again_they_are_compressed(ids: torch.Tensor) -> None:
    model: Any = make_tiny("llama")
    down = model.model.layers[2].mlp.down_proj
    parametrizations.weight_norm(down)
    remove_parametrizations(down, "weight")
    done: Any = compress(model, method="magnitude", sparsity=0.5)
    zeros = (done.model.model.layers[2].mlp.down_proj.weight == 0).float().mean()
    assert abs(float(zeros) - 0.5) < 1e-3
