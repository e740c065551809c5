"""A model that is read from files layer by layer gets the costs, and the file, of the one in memory."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget.test_spend import ENGINES, text, texts, tiny
from families import zoo
from helpers import make_tokenizer, saved
from transformers import PreTrainedModel

from lyapunov_prune.budget.cost import costs
from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.budget.spend import spend
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.loading import load

IDS = torch.randint(90, (3, 24), generator=torch.Generator().manual_seed(0))


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
    with pytest.raises(LyapunovPruneError):
        spend(apart, apart.tokenizer, "8bpw", tmp_path / "folder", **texts())
    assert not (tmp_path / "folder").exists()
