"""A model that is read from files layer by layer gets the costs, and the file, of the one in memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from budget.test_spend import ENGINES, text, texts, tiny
from families import zoo
from helpers import make_tokenizer, saved
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lyapunov_prune.budget.cost import costs
from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.budget.schemes import Schemes
from lyapunov_prune.budget.spend import spend
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.how import How
from lyapunov_prune.models.loading import load
from lyapunov_prune.results.worth import Ratio, Worth

IDS = torch.randint(90, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def without_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feedback pays on some machines and not on others here, and a streamed model has none."""
    refused = Mock(side_effect=LyapunovPruneError("not from disk"))
    monkeypatch.setattr(import_module(spend.__module__), "fed_forward", refused)


def both(model: PreTrainedModel, place: Path) -> tuple[Decoder, Decoder]:
    """The model in memory and streamed, from the same files."""
    folder = saved(model, make_tokenizer(), place / "tiny")
    return load(folder), load_streamed(folder)


def passes(decoder: Decoder) -> int:
    stream: Any = decoder.stream
    return stream.passes


# Tied, tied and scaled with capped logits, experts in one tensor, learnt positions, several states.
@pytest.mark.parametrize("family", ["smollm3", "gemma2", "qwen3_moe", "opt", "deepseek_v4"])
def test_every_kind_of_layer_has_the_same_sums(family: str, tmp_path: Path) -> None:
    whole, apart = both(zoo.make_zoo(family), tmp_path)
    wanted, before = dict(fisher(read(whole, IDS), matrices_of(whole.model), 0)), passes(apart)
    found = {}
    for name, F in fisher(read(apart, IDS), matrices_of(apart.model), 0):
        layer = apart.structure.layer_of(name)
        assert {k for k, each in enumerate(apart.layers) if not next(each.parameters()).is_meta} == {layer} - {None}
        found[name] = F
    assert passes(apart) - before == 2
    assert found.keys() == wanted.keys()
    for name, F in found.items():
        assert float((F - wanted[name]).norm()) <= 1e-5 * float(wanted[name].norm()), name
    assert all(p.grad is None for p in apart.model.parameters())


def test_few_matrices_at_once_and_states_in_a_file_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, apart = both(tiny(tie_word_embeddings=True), tmp_path)
    reading = read(apart, IDS)
    together = dict(fisher(reading, matrices_of(apart.model), 0))
    monkeypatch.setattr("lyapunov_prune.budget.gradients.free_memory", lambda device: 5e4)
    monkeypatch.setattr("lyapunov_prune.forward.states.free_memory", lambda device: 0)
    (tmp_path / "states").mkdir()
    for name, F in fisher(reading, matrices_of(apart.model), 0, tmp_path / "states"):
        assert torch.equal(F, together.pop(name))
    assert not together
    assert not list((tmp_path / "states").iterdir())


def test_gradients_that_go_past_the_state_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, apart = both(tiny(), tmp_path)
    layers: Any = apart.layers
    with monkeypatch.context() as patch:
        patch.setattr(layers[1].mlp.up_proj, "weight", layers[0].mlp.up_proj.weight)
        with pytest.raises(LyapunovPruneError, match=r"share model\.layers\.0\.mlp\.up_proj"):
            next(fisher(read(apart, IDS), matrices_of(apart.model), 0))
    changes = {**zoo.CHANGES["gemma4_text"], "num_kv_shared_layers": 0}  # streamed, with embeddings by layer
    monkeypatch.setitem(zoo.CHANGES, "gemma4_text", changes)
    _, apart = both(zoo.make_zoo("gemma4_text"), tmp_path / "other")
    with pytest.raises(LyapunovPruneError, match="embeddings by layer"):
        next(fisher(read(apart, IDS), matrices_of(apart.model), 0))


@ENGINES
@pytest.mark.usefixtures("without_feedback")
def test_the_file_is_that_of_the_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lyapunov_prune.models.weight_files.BUFFER", 64)  # of several parts, as large tensors are
    whole, apart = both(tiny(tie_word_embeddings=True, torch_dtype=torch.bfloat16), tmp_path)
    files = [tmp_path / "made" / name for name in ("whole.gguf", "apart.gguf")]
    a, b = (spend(m, m.tokenizer, "6bpw", file, **texts()) for m, file in zip((whole, apart), files, strict=True))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert set((tmp_path / "made").iterdir()) == set(files)  # the rounded tensors are gone
    np.testing.assert_allclose(b.kl, a.kl, rtol=1e-5)
    np.testing.assert_allclose(b.loss, a.loss, rtol=1e-5, atol=1e-7)
    assert dict(zip(b.names, b.types, strict=True)) == dict(zip(a.names, a.types, strict=True))
    assert b.predicted == pytest.approx(a.predicted, rel=1e-5)
    assert b.measured_on == a.measured_on
    assert apart.model.get_input_embeddings().weight.equal(whole.model.get_input_embeddings().weight)


@ENGINES
def test_a_wrong_cost_is_told_and_nothing_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    _, apart = both(tiny(), tmp_path)
    planted = [replace(t, cost=t.cost / 6) for t in costs(read(apart, text("a")))]
    monkeypatch.setattr(import_module(spend.__module__), "costs", lambda *args, **options: iter(planted))
    found = spend(apart, apart.tokenizer, "6bpw", tmp_path / "x.gguf", **texts())
    assert (found.as_they_are, found.alone) == (True, ())
    assert len(found.answer()) > len(replace(found, as_they_are=False).answer())


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_folders(a: Path, b: Path) -> bool:
    first, second = tensors_in(a), tensors_in(b)
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("without_feedback")
def test_the_folder_is_that_of_the_model_in_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    whole, apart = both(tiny(tie_word_embeddings=True, torch_dtype=dtype), tmp_path)
    folders = [tmp_path / "made" / name for name in ("whole", "apart")]
    a, b = (
        spend(m, m.tokenizer, "7.5bpw", target, **texts()) for m, target in zip((whole, apart), folders, strict=True)
    )
    assert same_folders(*folders)
    assert len(set(a.types)) > 2
    for name in ("config.json", "README.md", "history.json"):
        assert (folders[0] / name).read_text() == (folders[1] / name).read_text()
    assert set((tmp_path / "made").iterdir()) == set(folders)  # the rounded tensors are gone
    np.testing.assert_allclose(b.kl, a.kl, rtol=1e-5)
    np.testing.assert_allclose(b.loss, a.loss, rtol=1e-5, atol=1e-7)
    assert (a.size, dict(zip(a.names, a.types, strict=True))) == (b.size, dict(zip(b.names, b.types, strict=True)))


def packed_alike(family: str, place: Path) -> bool:
    """Whether the family is packed to the same tensors; False if both refuse it."""
    whole, apart = both(zoo.make_zoo(family), place)
    try:
        storage = Schemes(whole)
    except LyapunovPruneError:
        with pytest.raises(LyapunovPruneError):
            Schemes(apart)
        return False
    assert Schemes(apart).together == storage.together
    chosen = {}
    for number, (name, p) in enumerate(matrices_of(whole.model).items()):
        kinds = storage.kinds_for(name, p.shape[-1])
        importance = np.random.default_rng(number).exponential(size=p.shape[-1]).astype(np.float32)
        chosen[name] = How(kinds[number % len(kinds)], importance)
    worth = Worth(None, Ratio(1.0, 1.0, 1.0), "text", 10)
    logits = []
    for name, decoder in {"whole": whole, "apart": apart}.items():
        made = storage.made(decoder, decoder.tokenizer, place / name, chosen)
        with torch.no_grad():
            logits.append(made.decoder.model(IDS, use_cache=False).logits)
        made.write((), worth)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-4)
    assert same_folders(place / "whole", place / "apart")
    return True


# Learnt positions and biases, fused matrices, tied and capped, several rotations; experts in one tensor, transposed.
@pytest.mark.parametrize("family", ["opt", "phi3", "gemma2", "gemma3_text", "qwen3_moe", "gpt2"])
def test_every_kind_of_layer_is_packed_alike_or_refused(family: str, tmp_path: Path) -> None:
    assert packed_alike(family, tmp_path) is (family not in ("qwen3_moe", "gpt2"))


@pytest.mark.parametrize("name", ["x.gguf", "folder"])
def test_a_full_disk_is_told_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, apart = both(tiny(), tmp_path)
    module = import_module(spend.__module__)
    monkeypatch.setattr(module, "costs", lambda *args, **options: pytest.fail("measured"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(LyapunovPruneError):
        spend(apart, apart.tokenizer, "8.5bpw", tmp_path / "made" / name, **texts())
    assert not (tmp_path / "made").exists()
