"""The whole model rounded to the bytes that a removal leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import VOCABULARY, make_tiny, make_tokenizer, write_gguf

from lyapunov_prune.budget.alone import rounded_alone
from lyapunov_prune.budget.spend import spend
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.size import stored_size

pytestmark = pytest.mark.skipif(not installed(), reason="xllamacpp is not installed")
SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def text(name: str, windows: int = 8) -> TokenBatch:
    ids = torch.randint(len(VOCABULARY), (windows, 32), generator=torch.Generator().manual_seed(len(name)))
    return TokenBatch(ids, name, "all", False)


def test_it_is_what_the_command_predicts_at_the_bytes_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    model = wrap(make_tiny("llama", **SIZES, max_position_embeddings=640))
    model.model.config._name_or_path = "a model"
    total = model.model.num_parameters()
    found = rounded_alone(model, total // 2, tmp_path, text("a", 4))
    assert found is not None
    assert found.bits == pytest.approx(8, rel=1e-3)
    assert found.command == f"lyapunov-prune shrink 'a model' --size {found.bits:.3g}bpw -o small.gguf"
    judged = {"judge": text("of b"), "check": text("for c")}
    made = spend(model, make_tokenizer(), f"{found.bits}bpw", tmp_path / "x.gguf", batch=text("a", 4), **judged)
    assert found.kl == pytest.approx(made.cost.sum(), rel=1e-6)  # without feedback, which needs more forwards
    untried = rounded_alone(model, total // 2, tmp_path, None)
    assert untried is not None
    assert untried.kl is None
    assert rounded_alone(model, total // 8, tmp_path, text("a")) is None  # below the narrowest types
    assert rounded_alone(wrap(make_tiny("gpt2")), 10**6, tmp_path, None) is None  # which llama.cpp is not told


def test_a_file_leaves_the_bits_that_the_file_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    made = write_gguf(make_tiny("llama", **SIZES), tmp_path / "a.gguf", values={}, packed=True)
    model, size = load(made), stored_size(made)
    assert size is not None
    found = rounded_alone(model, model.model.num_parameters() * 3 // 4, tmp_path / "b.gguf", None)
    assert found is not None
    assert found.bits == pytest.approx(min(16, size.bits) * 3 / 4, rel=1e-2)
