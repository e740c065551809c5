"""A file of a size: what it costs is what second order says, and what is not a size is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gguf import LlamaFileType
from helpers import VOCABULARY, make_mixture, make_tiny, make_tokenizer
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.budget import cost
from lyapunov_prune.budget.blocks import BLOCKS
from lyapunov_prune.budget.feedback import OwnText
from lyapunov_prune.budget.fisher import fisher, matrices_of
from lyapunov_prune.budget.size import bytes_for
from lyapunov_prune.budget.spend import spend
from lyapunov_prune.budget.spent import Spent
from lyapunov_prune.budget.storage import Chosen, Storage
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export import llama_cpp
from lyapunov_prune.export.format import Quantisation
from lyapunov_prune.export.gguf_whole import write_gguf
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.ggml import Kind
from lyapunov_prune.models.gguf import read_gguf
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.predictions.divergence import kl_by_window
from lyapunov_prune.results.history import history_of

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


def texts(batch: int = 4, judge: int = 8, check: int = 4) -> dict[str, TokenBatch]:
    """Three texts of so many windows."""
    return {"batch": text("a", batch), "judge": text("of b", judge), "check": text("for c", check)}


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
    monkeypatch.setattr("lyapunov_prune.budget.gradients.free_memory", lambda device: 2e5)
    alone = dict(fisher(reading, matrices_of(model), 0))
    assert list(alone) == list(together)
    assert all(torch.allclose(alone[name], together[name]) for name in alone)


def test_the_rows_of_a_sample_stand_for_all() -> None:
    random = np.random.default_rng(0)
    W = random.normal(size=(4000, 32)).astype(np.float32) * random.exponential(size=(4000, 1)).astype(np.float32)
    F = random.exponential(size=W.shape).astype(np.float32) * random.exponential(size=(4000, 1)).astype(np.float32) ** 2
    rows, share = cost._sample(W, F, 400)
    assert len(rows) <= 400
    assert (np.diff(rows) > 0).all()
    for moved in (W * random.normal(size=W.shape), np.abs(W).max(1, keepdims=True) * random.normal(size=W.shape)):
        all_of_them = float((F * moved**2).sum())
        assert float((F[rows] * share[:, None] * moved[rows] ** 2).sum()) == pytest.approx(all_of_them, rel=0.1)
    rows, share = cost._sample(W[:400], F[:400], 400)
    assert rows.tolist() == list(range(400))
    assert (share == 1).all()
    rows, share = cost._sample(W, np.zeros_like(F), 400)
    assert len(rows)
    assert not share.any()


@ENGINES
def test_without_a_size_the_smallest_that_costs_little_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    found = spend(tiny(), make_tokenizer(), None, tmp_path / "x.gguf", **texts())
    assert found.tried is not None
    assert found.tried.taken is not None
    assert found.wanted == found.tried.names[found.tried.taken]
    assert found.bits <= float(found.wanted.removesuffix("bpw"))
    assert found.tried.bytes[found.tried.taken] == pytest.approx(found.bytes.sum(), rel=0.05)
    assert found.tried.measured_on.text != found.judged_on.text
    assert Spent.load(found.save(tmp_path / "x.json")).wanted == found.wanted
    monkeypatch.setattr("lyapunov_prune.evaluation.sizes.GOOD", 0.5)
    with pytest.raises(CheckFailed):
        spend(tiny(), make_tokenizer(), None, tmp_path / "y.gguf", **texts())
    assert not (tmp_path / "y.gguf").exists()


@ENGINES
def test_a_file_of_the_size_loads_and_costs_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp runs it too: no row is whole blocks of 256, and IQ4_NL takes its inputs as Q8_0 does."""
    model, target = tiny(), tmp_path / "x.gguf"
    before = {name: p.clone() for name, p in model.state_dict().items()}
    copied = Mock(wraps=copy.deepcopy)
    monkeypatch.setattr(copy, "deepcopy", copied)
    found = spend(model, make_tokenizer(), "6bpw", target, **texts())
    assert sum(call.args[0] is model for call in copied.mock_calls) == 2  # one of them with feedback
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert 5.5 < found.bits <= 6
    assert found.predicted == pytest.approx(found.measured.change, rel=0.3)
    header = read_header(target)
    written = {t.quantisation: t.size for t in header.tensors}
    assert written.keys() - {"F32"} == set(found.types)
    there = read_gguf(target, {"dtype": torch.float32, "device_map": "cpu"}).model
    (step,) = history_of(there).steps
    assert (step.kind, {seen.text for seen in step.saw}) == ("shrink", {"a", "for c"})  # the judge is unseen
    assert found.against_dense().told()[1:] in str(header.read("general.description"))
    why = lp.explain(model, there, text("of b", windows=8))
    good, bad = (replace(why, rise=np.full(8, rise), file_size=10**5).following().split() for rise in (0.01, 1.0))
    assert (good[0], bad[0]) == ("eval", "shrink")
    assert float(bad[bad.index("--size") + 1][:-2]) == pytest.approx(0.1 + model.num_parameters() / 8e6, rel=1e-3)
    with torch.no_grad():
        ids = text("of b", windows=8).ids
        p, q = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (model, there))
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(found.measured.change, rel=1e-3)
    rise = (p - q).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
    assert found.loss == pytest.approx(rise.numpy(), rel=1e-2, abs=1e-6)
    frontier = found.frontier
    assert (frontier.best <= frontier.alike * (1 + 1e-9)).all()
    assert (np.diff(frontier.best) <= 0).all()
    assert frontier.types[-1] == "Q8_0"
    assert frontier.bits[-1] == pytest.approx(8.5)
    assert "<svg" in found.plot()["sizes"]
    kinds = {each.name.partition("_")[2]: each for each in LlamaFileType}
    most = max(set(found.types), key=lambda kind: sum(found.bytes[np.array(found.types) == kind]))
    assert header.read("general.file_type") == next(kinds[name] for name in sorted(kinds) if name.startswith(most))
    assert Spent.load(found.save(tmp_path / "size.json")).types == found.types
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    size = f"{target.stat().st_size / 1e3:.1f}KB"
    again = spend(model, make_tokenizer(), size, tmp_path / "y.gguf", **texts())
    assert (tmp_path / "y.gguf").stat().st_size <= float(size[:-2]) * 1e3
    assert again.bits == pytest.approx(found.bits, rel=0.1)


@ENGINES
def test_experts_of_one_tensor_get_one_type_by_the_sum_of_their_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    # A token takes all experts: which of them it takes can change, and no derivative knows.
    sizes |= {"num_experts_per_tok": 8, "max_position_embeddings": 640}
    model = make_mixture("qwen3_moe", **sizes, use_sliding_window=False)
    model.config._name_or_path = "tiny"
    matrices = matrices_of(model)
    assert [name for name in matrices if ".1.mlp" in name] == [
        f"model.layers.1.mlp.experts.{each}" for each in ("gate_up_proj", "down_proj")
    ]
    reading, name = read(wrap(model), text("a")), "model.layers.1.mlp.experts.down_proj"
    F = dict(fisher(reading, {name: matrices[name]}, 0))[name].numpy()
    found = next(t for t in cost.costs(reading) if t.name == name)
    assert found.importance.shape == (8, 32)
    W, k = matrices[name].detach().numpy(), found.kinds.index(Kind.Q4_0)
    moved = np.stack([BLOCKS.rounded(w, Kind.Q4_0, c) for w, c in zip(W, found.importance, strict=True)]) - W
    assert found.cost[k] == pytest.approx(0.5 * (F * moved.astype(np.float64) ** 2).sum(), rel=1e-5)
    few = tmp_path / "x.gguf"
    made = spend(model, make_tokenizer(), "6bpw", few, **texts(24, 24))
    assert made.bits <= 6
    assert made.predicted == pytest.approx(made.measured.change, rel=0.3)
    written = {t.name: t.quantisation for t in read_header(few).tensors}
    assert written["blk.1.ffn_down_exps.weight"] == dict(zip(made.names, made.types, strict=True))[name]
    assert written["blk.1.ffn_gate_inp.weight"] == "F32"


@ENGINES
def test_a_cost_that_is_wrong_is_measured_and_the_types_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    model = tiny()
    right = list(cost.costs(read(wrap(model), text("a", windows=24))))
    wrong = max(right, key=lambda t: float(t.cost[t.kinds.index(Kind.Q4_0)])).name
    planted = [replace(t, cost=t.cost / (6 if t.name == wrong else 1)) for t in right]
    made = {}
    for name, found in {"right": right, "planted": planted}.items():
        monkeypatch.setattr(import_module(spend.__module__), "costs", lambda *args, found=found, **options: iter(found))
        made[name] = spend(model, make_tokenizer(), "6bpw", tmp_path / f"{name}.gguf", **texts(24, 24, 12))
    assert not made["right"].alone
    assert len(made["right"].kl) == 24
    assert wrong in made["planted"].alone
    assert len(made["planted"].kl) == 24
    kl = {name: each.measured.change for name, each in made.items()}
    assert kl["planted"] == pytest.approx(kl["right"], rel=0.3)
    assert made["planted"].predicted == pytest.approx(kl["planted"], rel=0.3)


@ENGINES
def test_feedback_stays_if_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    module, made = import_module(spend.__module__), {}

    def impossible(*args: object) -> Chosen:
        raise LyapunovPruneError("no token reaches it")

    def zeros(own: OwnText, storage: Storage, chosen: Chosen, *others: object) -> Chosen:
        shapes = {name: p.shape for name, p in own.reading.model.named_parameters()}
        blank = {name: np.zeros(shapes[name], np.float32) for name in chosen}
        return {name: how._replace(stored=storage.stored(blank[name], *how[:2])) for name, how in chosen.items()}

    for name, feedback in {"fed": module.fed_forward, "impossible": impossible, "zeros": zeros}.items():
        monkeypatch.setattr(module, "fed_forward", feedback)
        target = tmp_path / f"{name}.gguf"
        made[name] = spend(tiny(tie_word_embeddings=True), make_tokenizer(), "5bpw", target, **texts(48, 24, 24))
        there = read_gguf(target, {"dtype": torch.float32, "device_map": "cpu"}).model
        kl = kl_by_window(
            read(wrap(tiny(tie_word_embeddings=True)), text("of b", 24)), read(wrap(there), text("of b", 24))
        )
        assert made[name].kl == pytest.approx(kl[0], rel=1e-3)
    monkeypatch.setattr(module, "free_memory", lambda device: 0)
    again = spend(tiny(tie_word_embeddings=True), make_tokenizer(), "5bpw", tmp_path / "x.gguf", **texts(48, 24, 24))
    assert (again.fed, again.kl.tolist()) == (None, made["impossible"].kl.tolist())
    fed = {name: each.fed or 0 for name, each in made.items()}
    assert 0 < fed["fed"] < 1
    assert made["fed"].measured.change < made["impossible"].measured.change
    assert made["impossible"].fed is None
    assert fed["zeros"] > 1
    assert (made["zeros"].kl == made["impossible"].kl).all()
    assert len(made["zeros"].answer()) > len(made["impossible"].answer())


@ENGINES
def test_rounded_twice_is_what_came_in_few_bits_and_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    kinds: dict[Quantisation, bool] = {"f16": False, "q8_0": True}
    for kind, twice in kinds.items():
        file = tmp_path / f"{kind}.gguf"
        write_gguf(tiny(), make_tokenizer(), file, kind)
        model = wrap(read_gguf(file, {"dtype": torch.float32, "device_map": "cpu"}).model)
        model.model.config._name_or_path = str(file)
        found = spend(model, make_tokenizer(), "6bpw", tmp_path / f"{kind}-6.gguf", **texts())
        assert found.rounded_before is twice
        assert any("rounded twice" in line for line in found.answer()) is twice
        kept = replace(found, cost=np.zeros_like(found.cost))
        assert not any("rounded twice" in line for line in kept.answer())


@pytest.mark.parametrize("size", ["", "300", "-3MB", "1.2.3MB", "bpw", "16bpw", "100%", "1GB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(LyapunovPruneError):
        bytes_for(size, 10**6, 1000)


def test_sizes_in_bytes() -> None:
    sizes = [bytes_for(size, 10**6, 1000) for size in ("50%", "4bpw", "1MB", "1 MiB")]
    assert sizes == [10**6, 5 * 10**5, 999000, 1047576]


def test_less_than_the_least_names_it(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"4\.25 bits"):  # 64 and 96 columns take blocks of 32 only
        spend(tiny(), make_tokenizer(), "3bpw", tmp_path / "x.gguf", **texts())
    assert not (tmp_path / "x.gguf").exists()


def test_types_follow_the_width_of_the_rows() -> None:
    assert {kind.name for kind in BLOCKS.kinds_for("", 576)} == {
        *("MXFP4", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")
    }
    assert Kind.Q2_K in BLOCKS.kinds_for("", 512)
    assert BLOCKS.kinds_for("", 512, 5.0)[1] == Kind.IQ3_XXS  # after the narrowest
    assert BLOCKS.kinds_for("", 7) == [Kind.BF16, Kind.F16]
