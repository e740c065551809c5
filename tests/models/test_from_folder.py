"""A folder is loaded as it is or refused in one clear line; no code of it is run, and nothing unpickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    BROKEN,
    TINY,
    UP,
    VOCABULARY,
    WEIGHTS,
    bert,
    edit_json,
    equal,
    linked,
    make_classifier,
    make_tiny,
    moe,
    shard,
)
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import from_folder
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.plain import quantisation

# Local folders.


def test_a_folder_is_loaded_as_it_is(checkpoint: Path, reader: PreTrainedModel) -> None:
    loaded = load(checkpoint)
    assert equal(loaded.model, reader)
    assert not loaded.model.training
    assert loaded.model.config._name_or_path == str(checkpoint)
    assert loaded.structure.layers is loaded.model.model.layers
    assert loaded.tokenizer("the")["input_ids"] == [VOCABULARY.index("th"), VOCABULARY.index("e")]


def test_every_family_is_loaded(family: str, checkpoint: Path, tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny(family, vocab_size=len(VOCABULARY))
    model.save_pretrained(checkpoint)
    loaded = load(str(checkpoint), offline=True)
    assert loaded.structure.model_type == TINY[family][0]
    assert equal(loaded.model, model)


def test_shards_are_joined(checkpoint: Path, reader: PreTrainedModel) -> None:
    shard(checkpoint, reader)
    assert equal(load(checkpoint).model, reader)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_is_the_asked_one(dtype: str, checkpoint: Path) -> None:
    assert load(checkpoint, dtype=dtype).model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_fused_experts_run_in_float64(family: str, ids: torch.Tensor, checkpoint: Path) -> None:
    """Their grouped kernel has no such products: in memory and streamed they go by the loop."""
    model: Any = moe(family)
    model.save_pretrained(checkpoint)
    model.double().set_experts_implementation("eager")
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        for made in (load, load_streamed):
            assert torch.allclose(made(checkpoint, dtype="float64").model(ids, use_cache=False).logits, wanted)


def test_the_dtype_is_the_checkpoint_s_own_if_none_is_asked(checkpoint: Path, reader: PreTrainedModel) -> None:
    load(checkpoint, dtype="bfloat16").model.save_pretrained(checkpoint)
    assert load(checkpoint).model.dtype == torch.bfloat16


@pytest.mark.parametrize("made", [load, load_streamed])
def test_weights_of_layers_that_the_config_does_not_name_are_told_once(
    made: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no word of a buffer of an older version."""
    weights = load_file(checkpoint / WEIGHTS)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(weights, checkpoint / WEIGHTS, {"format": "pt"})
    made(checkpoint)
    assert capsys.readouterr().err == ""
    save_file(weights | {"model.layers.11.foo.weight": torch.zeros(2)}, checkpoint / WEIGHTS, {"format": "pt"})
    edit_json(checkpoint / "config.json", num_hidden_layers=4, layer_types=None)
    made(checkpoint)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "holds 19 tensors (9 of model.layers.4, 9 of model.layers.5, 1 of model.layers.11), left out" in told


def test_transformers_speaks_as_before(checkpoint: Path) -> None:
    transformers.logging.set_verbosity_info()
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    load(checkpoint)
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before
    transformers.logging.set_verbosity_warning()  # its default


# Broken folders: a function that spoils the checkpoint, and what is said about it.


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_refused(fault: str, checkpoint: Path) -> None:
    spoil, message = BROKEN[fault]
    spoil(checkpoint)
    with pytest.raises(LyapunovPruneError, match=message) as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)


def test_a_pickle_beside_safetensors_is_not_read(checkpoint: Path, reader: PreTrainedModel) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({"never": "read"}))
    assert equal(load(checkpoint).model, reader)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda: transformers.BertLMHeadModel(bert()), "an encoder"),
        (lambda: transformers.BertForMaskedLM(bert()), "an encoder"),
        (
            lambda: transformers.T5ForConditionalGeneration(t5()),
            "T5For",
        ),
        (lambda: make_classifier("vit"), "ViTForImageClassification"),
    ],
    ids=["encoder as a decoder", "encoder", "encoder-decoder", "image classifier"],
)
def test_no_decoder_is_refused(save: Callable[[], PreTrainedModel], message: str, checkpoint: Path) -> None:
    save().save_pretrained(checkpoint)
    with pytest.raises(LyapunovPruneError, match=message):
        load(checkpoint)


def t5() -> transformers.T5Config:
    return transformers.T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)


# Code from a checkpoint.


@pytest.fixture
def trap(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears when the checkpoint's code runs; whoever asks on stdin is told yes."""
    sprung = checkpoint.parent / "sprung"
    (checkpoint / "code.py").write_text(
        f"open({str(sprung)!r}, 'w').close()\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return sprung


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}),
        ("tokenizer_config.json", {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}),
    ],
    ids=["model", "tokenizer"],
)
def test_a_checkpoint_that_needs_its_own_code_is_refused(
    file: str, changes: dict[str, Any], checkpoint: Path, trap: Path
) -> None:
    edit_json(checkpoint / file, **changes)
    with pytest.raises(LyapunovPruneError, match="Python code"):
        load(checkpoint)
    assert not trap.exists()


def test_code_beside_a_known_architecture_is_ignored(checkpoint: Path, trap: Path, reader: PreTrainedModel) -> None:
    edit_json(checkpoint / "config.json", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    assert equal(load(checkpoint).model, reader)
    assert not trap.exists()


# What a checkpoint may name: files of its own, of the two formats, and what is built in.


def index(folder: Path, **places: Any) -> None:
    """The weights in one file as an index knows them; `places` says where tensors are that are elsewhere."""
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    where = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors") | places
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.fixture
def never_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))


@pytest.mark.parametrize("all_of_it", [True, False], ids=["all", "one tensor"])
@pytest.mark.parametrize("name", ["x.bin", "X.BIN", "x.pt", "x.pth", "x.ckpt", "x", "x.SAFETENSORS", "x.gguf"])
def test_an_index_that_names_another_format_is_refused(
    name: str, all_of_it: bool, checkpoint: Path, never_unpickled: None
) -> None:
    weights = load_file(checkpoint / WEIGHTS)
    torch.save(weights, checkpoint / name)
    index(checkpoint, **(dict.fromkeys(weights, name) if all_of_it else {UP: name}))
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights, .*safetensors"):
        load(checkpoint)


OUTSIDE = ["../x.safetensors", "{}/x.safetensors", "sub/x.safetensors", "sub/../a.safetensors", "./a.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leaves_the_folder_is_refused(name: str, checkpoint: Path) -> None:
    (checkpoint / "sub").mkdir()
    for place in (checkpoint.parent, checkpoint / "sub"):
        save_file({UP: torch.zeros(48, 32)}, place / "x.safetensors", {"format": "pt"})
    index(checkpoint, **{UP: (name := name.format(checkpoint.parent))})
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights, .*that folder"):
        load(checkpoint)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1, "b": "c"}}', "[" * 9**5],
    ids=["cut", "a list", "no map", "a list as map", "numbers", "deep"],
)
def test_a_broken_index_is_refused(content: str, checkpoint: Path) -> None:
    index(checkpoint)
    (checkpoint / f"{WEIGHTS}.index.json").write_text(content)
    with pytest.raises(LyapunovPruneError, match=r"index\.json is not an index"):
        load(checkpoint)


@pytest.mark.parametrize("name", [3, {"a": "b"}, "x.safetensors\0"])
def test_an_index_of_no_names_is_refused(name: Any, checkpoint: Path) -> None:
    index(checkpoint, **dict.fromkeys(load_file(checkpoint / WEIGHTS), name))
    with pytest.raises(LyapunovPruneError, match=r"as weights|not an index of weights"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["adapter_model.bin", "x.bin", "../x.safetensors", "sub/x.safetensors", "", 5])
def test_a_config_that_names_other_weights_is_refused(name: Any, checkpoint: Path, never_unpickled: None) -> None:
    (checkpoint / "sub").mkdir()
    weights = load_file(checkpoint / WEIGHTS)
    for place in (checkpoint, checkpoint.parent, checkpoint / "sub"):
        save_file(weights, place / "x.safetensors", {"format": "pt"})
    torch.save(weights, checkpoint / "adapter_model.bin")
    edit_json(checkpoint / "config.json", transformers_weights=name)
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights"):
        load(checkpoint)


def test_a_config_that_names_weights_which_are_not_there_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", transformers_weights="x.safetensors")
    with pytest.raises(LyapunovPruneError, match=r"x\.safetensors as weights"):
        load(checkpoint)


def test_a_config_that_names_weights_twice_is_refused(checkpoint: Path) -> None:
    """transformers takes the config of the text inside for these, and the name that it gives."""
    config = transformers.AutoConfig.for_model("qwen3_5")
    config.text_config.transformers_weights = "x.safetensors"
    config.to_json_file(checkpoint / "config.json")
    with pytest.raises(LyapunovPruneError, match=r"None and x\.safetensors"):
        load(checkpoint)


@pytest.mark.parametrize("setting", ["hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads"])
def test_a_config_of_sizes_that_no_memory_holds_is_refused_before_they_are_allocated(
    setting: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(checkpoint / "config.json", **{setting: 2**24})
    monkeypatch.setattr(from_folder, "load_weights", None)
    with pytest.raises(LyapunovPruneError):
        load(checkpoint)


def test_the_shards_of_a_distributed_run_are_refused(checkpoint: Path) -> None:
    save_file({UP: torch.zeros(1)}, checkpoint / "shard-00001-model-00001-of-00001.safetensors", {"format": "pt"})
    with pytest.raises(LyapunovPruneError, match="distributed run"):
        load(checkpoint)


def test_a_folder_of_links_as_the_hub_s_cache_has_them_is_loaded(checkpoint: Path, reader: PreTrainedModel) -> None:
    linked(checkpoint)
    assert equal(load(checkpoint).model, reader)


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "org/any:function"},
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": {"": "org/any"}},
        {"_attn_implementation": "paged|org/any"},
        {"experts_implementation": "sonicmoe"},
        {"text_config": {"_attn_implementation": "org/any"}},
    ],
    ids=str,
)
def test_a_config_that_asks_for_a_kernel_is_refused(
    changes: dict[str, Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = lambda *_, **__: pytest.fail("a kernel was asked for")  # noqa: E731
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", fetched)
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(LyapunovPruneError, match="eager, sdpa"):
        load(checkpoint, offline=True)


@pytest.mark.parametrize("name", ["eager", "sdpa", None])
def test_a_config_may_choose_among_what_is_built_in(
    name: str | None, checkpoint: Path, reader: PreTrainedModel
) -> None:
    edit_json(checkpoint / "config.json", _attn_implementation=name, _attn_implementation_autoset=True)
    edit_json(checkpoint / "config.json", cache_implementation="hybrid")
    loaded = load(checkpoint)
    assert equal(loaded.model, reader)
    assert loaded.model.config._attn_implementation == (name or "sdpa")


@pytest.mark.parametrize("content", [b"", b'{"temperature": 0.', b"[]", b"null", b"\xff\xfe{", None], ids=str)
def test_a_broken_generation_config_is_refused(content: bytes | None, checkpoint: Path) -> None:
    file = checkpoint / "generation_config.json"
    file.unlink()
    if content is None:
        file.symlink_to("nowhere")
    else:
        file.write_bytes(content)
    with pytest.raises(LyapunovPruneError, match=r"generation_config\.json"):
        load(checkpoint)


def test_a_checkpoint_needs_no_generation_config(checkpoint: Path, reader: PreTrainedModel) -> None:
    (checkpoint / "generation_config.json").unlink()
    assert equal(load(checkpoint).model, reader)


def test_a_quantised_text_model_inside_is_refused() -> None:
    config = transformers.AutoConfig.for_model("gemma3")
    config.text_config.quantization_config = {"quant_method": "fp8"}
    assert quantisation(config) == "quantised (fp8)"
    assert quantisation(transformers.AutoConfig.for_model("gemma3")) == ""


@pytest.mark.parametrize("fault", ["no model_type", "a padding token outside the vocabulary", "cut"])
def test_only_a_broken_file_is_to_be_fetched_again(
    fault: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_tiny("phi3").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if fault == "no model_type":
        del config["model_type"]
    elif fault != "cut":
        config["pad_token_id"] = 32000
    text = json.dumps(config)
    path.write_text(text[: len(text) // 2] if fault == "cut" else text)
    with pytest.raises(LyapunovPruneError) as refused:
        load(tmp_path)
    assert ("fetch it again" in str(refused.value)) == (fault == "cut")


def test_a_tensor_under_a_name_of_another_program_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    make_tiny("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.mlp.other.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LyapunovPruneError, match=r"up_proj.*holds model\.layers\.0\.mlp\.other"):
        load(tmp_path)


@pytest.mark.parametrize("scale", [None, "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_matrices_in_8_bits_that_the_config_does_not_name_are_refused(
    scale: str | None, dtype: torch.dtype, checkpoint: Path
) -> None:
    """They were read without their scales: another model, 138 % off."""
    state = load_file(checkpoint / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = (100 * state[name]).to(dtype)
    if scale:
        state[name.replace("weight", scale)] = torch.full((1,), 0.01)
    save_file(state, checkpoint / WEIGHTS, {"format": "pt"})
    for way in (load, load_streamed, lambda folder: read_outline(folder, folder)):
        with pytest.raises(LyapunovPruneError, match=r"up_proj\.weight in (F8|I8).*original weights"):
            way(checkpoint)
