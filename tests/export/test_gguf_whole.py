"""A model that was never a GGUF file is written as one: transformers and llama.cpp read what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, equal, make_mixture, make_small, make_tiny, make_tokenizer, write_gguf
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.llama_cpp import installed
from lyapunov_prune.export import gguf_whole, llama_cpp
from lyapunov_prune.export.formats.gguf import GGUF
from lyapunov_prune.export.formats.plain import Plain
from lyapunov_prune.export.gguf_whole import ROUNDED
from lyapunov_prune.export.gguf_whole import write_gguf as export
from lyapunov_prune.export.llama_cpp import ENGINE
from lyapunov_prune.models import gguf_tensors
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.gguf_copy import Piece
from lyapunov_prune.models.gguf_header import Value, read_header
from lyapunov_prune.models.loading import load
from lyapunov_prune.results.history import history_of

# No windows but Gemma's, whose layers come by periods.
FEW = {"num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": FEW,
    "mistral": {**FEW, "sliding_window": None, "head_dim": 32},
    "qwen2": {**FEW, "use_sliding_window": False},
    "qwen3": {**FEW, "use_sliding_window": False, "head_dim": 128},
    "gemma2": {**FEW, "head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6},
    "phi3": {**FEW, "sliding_window": None, "tie_word_embeddings": True},
}
MIXED: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2_moe": {"use_sliding_window": False, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"use_sliding_window": False, "moe_intermediate_size": 32},
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
WINDOWED = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 320}
ENGINES = pytest.mark.skipif(not installed(), reason="xllamacpp is not installed")


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    """A model that llama.cpp's own test text fits into."""
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    make, own = (make_mixture, MIXED[name]) if name in MIXED else (make_tiny, FAMILIES[name])
    model = make(name, **{**sizes, "max_position_embeddings": 640, **own, **changes})
    model.config._name_or_path = "tiny"
    return model


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)


def passes(*args: Any, **options: Any) -> GateCheck:
    return GateCheck(RELOADED, True, 0.0, 0.0, "")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_back_in_transformers_and_llama_cpp(name: str, tmp_path: Path) -> None:
    told = export(wrap(tiny(name)), make_tokenizer(), tmp_path / "x.gguf", "q8_0")
    assert [check.name for check in told.checks] == [ROUNDED, RELOADED, *[ENGINE] * installed()]
    assert told.stored["Q8_0"] > told.stored["F32"]


@ENGINES
@pytest.mark.parametrize("name", MIXED)
def test_experts_in_one_tensor_are_read_back(name: str, tmp_path: Path) -> None:
    model = wrap(tiny(name))
    told = export(model, make_tokenizer(), tmp_path / "x.gguf", "q8_0")
    assert [check.name for check in told.checks] == [ROUNDED, *[RELOADED] * (name != "mixtral"), ENGINE]
    shapes = {t.name: (t.quantisation, t.dims) for t in read_header(tmp_path / "x.gguf").tensors}
    wide = 96 if name == "mixtral" else 32
    assert shapes["blk.1.ffn_gate_exps.weight"] == shapes["blk.1.ffn_up_exps.weight"] == ("Q8_0", (64, wide, 8))
    assert shapes["blk.1.ffn_down_exps.weight"] == ("Q8_0", (wide, 64, 8))
    assert shapes["blk.1.ffn_gate_inp.weight"] == ("F32", (64, 8))


@ENGINES
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_gates_and_ups_that_change_places_fail_the_gate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = gguf_tensors._parts

    def swapped(own: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        found = parts(own, tensor)
        return [(known, part) for (known, _), (_, part) in zip(found, reversed(found), strict=True)]

    monkeypatch.setattr(gguf_tensors, "_parts", swapped)
    with pytest.raises(CheckFailed, match=ENGINE if name == "mixtral" else RELOADED):
        export(wrap(tiny(name)), make_tokenizer(), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 160}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1 + i / 4 for i in range(8)]}
OLDER = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 5e4}
NARROW = {"head_dim": 16, "query_pre_attn_scalar": 16}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"rope_parameters": LINEAR}) for name in ("llama", "mistral", "qwen2", "qwen3")),
    *((name, {"rope_parameters": YARN}) for name in ("llama", "mistral", "qwen2", "qwen3")),
    *((name, {"rope_parameters": SCALED}) for name in ("llama", "mistral")),
    ("llama", {"rope_parameters": SCALED, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 3e-5}),
    ("qwen3", {"rope_parameters": YARN | {"factor": 4.0}, "head_dim": 16}),
    ("phi3", {"rope_parameters": LONG | FACTORS}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}}),
    ("gemma3", {**NARROW, "sliding_window_pattern": 3}),
    ("gemma3", {**NARROW, "rope_parameters": {"full_attention": OLDER, "sliding_attention": LOCAL}}),
    ("gemma2", {**NARROW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("name", "changes"), SETTINGS)
def test_every_setting_is_read_back_and_computed_by_llama_cpp(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = wrap(tiny(name, **changes))
    told = export(model, make_tokenizer(), tmp_path / "x.gguf", "f32")
    assert [check.name for check in told.checks] == [ROUNDED, RELOADED, *[ENGINE] * installed()]
    again = load(tmp_path / "x.gguf")
    if not name.startswith("gemma"):  # whose norms gain one in the file, in float32
        assert equal(again.model, model.model)
    config = again.structure.config
    assert config.rms_norm_eps == model.structure.config.rms_norm_eps
    ids = torch.arange(2, 90)[None]
    with torch.no_grad():
        assert torch.allclose(again.model(ids).logits, model.model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("fault", ["queries", "norms", "shifted back"])
def test_numbers_in_a_wrong_place_fail_the_gate(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not permuted, as llama.cpp wants queries and keys, or norms without the one that it wants: both load."""
    name = "llama" if fault == "queries" else "gemma3"
    laid_out = gguf_tensors._laid_out

    def wrong(name: str, values: torch.Tensor, *args: Any, into_file: bool) -> torch.Tensor:
        right = fault == "shifted back" and not into_file
        return laid_out(name, values, *args, into_file=into_file) if right else values

    monkeypatch.setattr(gguf_tensors, "_laid_out", wrong)
    with pytest.raises(CheckFailed, match=ROUNDED if fault == "shifted back" else RELOADED):
        export(wrap(tiny(name)), make_tokenizer(), tmp_path / "x.gguf")
    if fault == "queries" and installed():  # llama.cpp sees it too
        monkeypatch.setattr(gguf_whole, "file_reloads", passes)
        with pytest.raises(CheckFailed, match=ENGINE):
            export(wrap(tiny(name)), make_tokenizer(), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


@ENGINES
@pytest.mark.parametrize(
    ("name", "changes", "missing"),
    [
        ("llama", {"rope_parameters": SCALED}, "rope_freqs.weight"),
        (
            "gemma3",
            {"sliding_window_pattern": 3, "head_dim": 16, "query_pre_attn_scalar": 16},
            "gemma3.attention.sliding_window_pattern",
        ),
        ("gemma2", {"attn_logit_softcapping": 2.0}, "gemma2.attn_logit_softcapping"),
    ],
)
def test_what_is_left_out_of_the_file_fails_in_llama_cpp(
    name: str, changes: dict[str, Any], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = gguf_whole.write_pieces

    def faulty(path: Path, values: dict[str, Value], pieces: list[Piece], alignment: int) -> dict[str, int]:
        kept = [piece for piece in pieces if piece.name != missing]
        assert len(kept) < len(pieces) or missing in values
        return write(path, {key: value for key, value in values.items() if key != missing}, kept, alignment)

    monkeypatch.setattr(gguf_whole, "write_pieces", faulty)
    with pytest.raises(CheckFailed, match=RELOADED):
        export(wrap(tiny(name, **changes)), make_tokenizer(), tmp_path / "x.gguf")
    monkeypatch.setattr(gguf_whole, "file_reloads", passes)
    with pytest.raises(CheckFailed, match=ENGINE):
        export(wrap(tiny(name, **changes)), make_tokenizer(), tmp_path / "x.gguf")


def test_the_tokenizer_and_the_history_of_a_file_that_is_there_are_kept(
    no_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    made = write_gguf(tiny("llama"), tmp_path / "a.gguf", values={})
    dense = load(made)
    Plain().export(dense, tmp_path / "folder")
    again = load(tmp_path / "folder")
    told = GGUF("f32").export(again, tmp_path / "b.gguf")
    first, second = read_header(made), read_header(tmp_path / "b.gguf")
    kept = {key: value for key, value in first.values.items() if key.startswith("tokenizer.")}
    assert kept == {key: value for key, value in second.values.items() if key.startswith("tokenizer.")}
    assert told.not_run == (ENGINE,)
    steps = history_of(load(tmp_path / "b.gguf").model).steps
    assert [(step.kind, Path(step.source).name) for step in steps] == [("export", "a.gguf"), ("export", "folder")]
    assert not history_of(dense.model).steps
    made.unlink()
    GGUF("f32").export(again, tmp_path / "c.gguf")
    assert read_header(tmp_path / "c.gguf").read("tokenizer.ggml.add_bos_token") is False


def test_windows_that_llama_cpp_does_not_know_limit_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(wrap(tiny("phi3", sliding_window=100)), make_tokenizer(), tmp_path / "x.gguf")
    assert "no windows of phi3" in capsys.readouterr().err
    assert read_header(tmp_path / "x.gguf").read("phi3.context_length") == 100


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("gpt2", {}, "gpt2 is not written as GGUF"),
        ("llama", {"hidden_act": "gelu"}, "no llama with activation gelu"),
        ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary scaling"),
        ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar 100"),
        ("gemma3", {"tie_word_embeddings": False}, "output matrix of its own"),
        ("qwen3", {"attention_bias": True}, "no qwen3 with biases"),
        ("phi3", {"head_dim": 32}, "heads of another width"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 64.0}}, "rotary scaling of its own kind"),
        ("gemma3", {"rope_parameters": {**WINDOWED, "sliding_attention": LINEAR}}, "rotary scaling linear of windows"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "with softcapped logits"),
        ("gemma2", {"attn_logit_softcapping": None}, "no softcapped logits"),
        ("gemma3", {"layer_types": ["full_attention", *["sliding_attention"] * 5]}, "as one period"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "dense layers between"),
    ],
)
def test_a_model_that_llama_cpp_cannot_be_told_is_refused(
    name: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = make_tiny(name, vocab_size=len(VOCABULARY)) if name == "gpt2" else tiny(name, **changes)
    with pytest.raises(LyapunovPruneError, match=told):
        export(wrap(model), make_tokenizer(), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_a_number_beyond_half_precision_is_refused_and_bf16_holds_it(no_engine: None, tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 7e4
    with pytest.raises(LyapunovPruneError, match=r"blk\.1\.ffn_up.*bf16"):
        export(wrap(model), make_tokenizer(), tmp_path / "x.gguf", "f16")
    export(wrap(model), make_tokenizer(), tmp_path / "x.gguf", "bf16")


@pytest.mark.parametrize("rope", [LINEAR, YARN, SCALED], ids=lambda rope: rope["rope_type"])
def test_a_scaling_is_kept_from_file_to_folder(
    rope: dict[str, Any], no_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was read without its scaling was off by half, and nothing said so."""
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    plain, made = tiny("llama"), wrap(tiny("llama", rope_parameters=rope))
    export(made, make_tokenizer(), tmp_path / "x.gguf", "f32")
    again = load(tmp_path / "x.gguf")
    wanted_rope = made.structure.config.rope_parameters
    assert again.structure.config.rope_parameters == {
        name: value if isinstance(value, str) else pytest.approx(value) for name, value in wanted_rope.items()
    }
    Plain().export(again, tmp_path / "folder")
    ids = torch.arange(2, 66)[None]
    with torch.no_grad():
        wanted = made.model(ids).logits
        assert (wanted - plain(ids).logits).norm() > 0.01 * wanted.norm()  # the scaling matters
        for one in (again, load(tmp_path / "folder")):
            assert torch.allclose(one.model(ids).logits, wanted, atol=1e-4)


def test_a_compact_model_stays_compact(tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="not written as GGUF"):
        export(wrap(make_small("llama")), make_tokenizer(), tmp_path / "x.gguf")
