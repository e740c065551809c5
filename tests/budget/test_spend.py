"""A file of a size: what it costs is what second order says, and what is not a size is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_tiny, make_tokenizer
from transformers import PreTrainedModel

from lyapunov_prune.budget import cost
from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.budget.size import bytes_for
from lyapunov_prune.budget.spend import spend
from lyapunov_prune.budget.spent import Spent
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.ggml import Kind
from lyapunov_prune.models.gguf import read_gguf
from lyapunov_prune.models.gguf_header import read_header

PROBED = ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight")
ENGINES = pytest.mark.skipif(not installed(), reason="xllamacpp is not installed")


def tiny(**changes: object) -> PreTrainedModel:
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = make_tiny("llama", **{**sizes, "max_position_embeddings": 640, **changes})
    model.config._name_or_path = "tiny"
    return model


def text(name: str, windows: int = 4, context: int = 32) -> TokenBatch:
    ids = torch.randint(len(VOCABULARY), (windows, context), generator=torch.Generator().manual_seed(len(name)))
    return TokenBatch(ids, name, "all", False)


@pytest.mark.parametrize("tied", [True, False])
def test_fisher_is_the_curvature_of_the_divergence(tied: bool) -> None:
    """½ Σ F ΔW² against the KL of random changes, whose mean over signs leaves the diagonal alone."""
    model = tiny(tie_word_embeddings=tied).double()
    batch = text("a", windows=96, context=8)
    found = dict(fisher(read(wrap(model), batch), matrices_of(model), 0))
    assert ("lm_head.weight" in found) != tied
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    random, size = torch.Generator().manual_seed(1), 1e-4
    with torch.no_grad():
        dense = model(batch.ids).logits.log_softmax(-1)
        for name in PROBED:
            p, kl = model.get_parameter(name), []
            for _ in range(12):
                change = size * (2 * torch.randint(2, p.shape, generator=random).double() - 1)
                p += change
                kl.append(float((dense.exp() * (dense - model(batch.ids).logits.log_softmax(-1))).sum(-1).mean()))
                p -= change
            assert 0.5 * float(found[name].double().sum()) * size**2 == pytest.approx(np.mean(kl), rel=0.3)


def test_few_matrices_at_once_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    reading = read(wrap(model), text("a"))
    together = dict(fisher(reading, matrices_of(model), 0))
    monkeypatch.setattr("lyapunov_prune.budget.fisher.free_memory", lambda device: 2e5)
    alone = dict(fisher(reading, matrices_of(model), 0))
    assert list(alone) == list(together)
    assert all(torch.allclose(alone[name], together[name]) for name in alone)


@ENGINES
def test_a_file_of_the_size_loads_and_costs_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)  # asked in test_gguf_whole
    model, target = tiny(), tmp_path / "x.gguf"
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = spend(model, make_tokenizer(), "6bpw", target, batch=text("a"), judge=text("of b"))
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert 5.5 < found.bits <= 6
    assert found.predicted == pytest.approx(found.measured.change, rel=0.3)
    written = {t.quantisation: t.size for t in read_header(target).tensors}
    assert written.keys() - {"F32"} == set(found.types)
    there = read_gguf(target, {"dtype": torch.float32, "device_map": "cpu"}).model
    with torch.no_grad():
        ids = text("of b").ids
        p, q = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (model, there))
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(found.measured.change, rel=1e-3)
    assert Spent.load(found.save(tmp_path / "size.json")).types == found.types
    size = f"{target.stat().st_size / 1e3:.1f}KB"
    again = spend(model, make_tokenizer(), size, tmp_path / "y.gguf", batch=text("a"), judge=text("of b"))
    assert (tmp_path / "y.gguf").stat().st_size <= float(size[:-2]) * 1e3
    assert again.bits == pytest.approx(found.bits, rel=0.1)


@pytest.mark.parametrize("size", ["", "300", "-3MB", "1.2.3MB", "bpw", "16bpw", "100%", "1GB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(LyapunovPruneError):
        bytes_for(size, 10**6, 1000)


def test_sizes_in_bytes() -> None:
    sizes = [bytes_for(size, 10**6, 1000) for size in ("50%", "4bpw", "1MB", "1 MiB")]
    assert sizes == [10**6, 5 * 10**5, 999000, 1047576]


def test_less_than_the_least_names_it(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"4\.25 bits"):  # 64 and 96 columns take blocks of 32 only
        spend(tiny(), make_tokenizer(), "3bpw", tmp_path / "x.gguf", batch=text("a"), judge=text("of b"))
    assert not (tmp_path / "x.gguf").exists()


def test_types_follow_the_width_of_the_rows() -> None:
    assert {kind.name for kind in cost.kinds_for(576)} == {
        *("MXFP4", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")
    }
    assert Kind.Q2_K in cost.kinds_for(512)
    assert cost.kinds_for(512, 5.0)[1] == Kind.IQ3_XXS  # after the narrowest
    assert cost.kinds_for(7) == [Kind.BF16, Kind.F16]
