"""A checkpoint of two factors a matrix: written whole past a gate that sees every planted fault, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, edit_json, make_tiny
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import compress
from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.compression.compress import Compressed
from lyapunov_prune.compression.recipe import Asked
from lyapunov_prune.compression.report import REPORT, CompressionReport
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import factored
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import GATE
from lyapunov_prune.export.factored import verify_factored, write_factored
from lyapunov_prune.export.factors import Factored, find_factored, with_factors
from lyapunov_prune.export.table import FORMATS
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.modeling_compact import CompactLlama
from lyapunov_prune.models.structure import find_layers, identify
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.results.history import read_history

PASSED = GateCheck("reloads without this package", True, 0.0, 1.0, "not run: it takes seconds")
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def done(reader: PreTrainedModel) -> Compressed:
    return compress(reader, method="svd", sparsity=0.4)


@pytest.fixture
def here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that takes seconds to start."""
    monkeypatch.setattr(factored, "elsewhere_check", lambda *_: PASSED)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


# The modules of factors are those of one class: each family in one dtype, and one family in all.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(("llama", dtype) for dtype in DTYPES), *((n, DTYPES[i % 3]) for i, n in enumerate(TINY) if n != "llama")],
)
def test_every_family_passes_the_gate(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    dense = compress(make_tiny(family).to(dtype), method="svd", sparsity=0.4)
    small = with_factors(dense.model, dense.report.ranks)
    small.save_pretrained(tmp_path)
    gate = verify_factored(
        dense.model, small, find_factored(dense.model, dense.report.ranks), tmp_path, elsewhere=False
    )
    assert gate.passed, f"\n{gate}"


@pytest.mark.parametrize("bias", [torch.ones(32), None], ids=["affine", "linear"])
def test_the_matrix_of_a_merged_block_may_be_two_factors(bias: torch.Tensor | None, tmp_path: Path) -> None:
    W = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    merged = make_compact(make_tiny("llama"), Cuts(merged={1: (W, bias)}))
    dense = compress(merged, method="svd", sparsity=0.4)
    small = with_factors(dense.model, dense.report.ranks)
    assert small.config.cuts[1]["mlp"].startswith(("linear" if bias is None else "affine") + " low-rank 32:")
    small.save_pretrained(tmp_path)
    gate = verify_factored(dense.model, small, find_factored(dense.model, dense.report.ranks), tmp_path)
    assert gate.passed, f"\n{gate}"
    with pytest.raises(LyapunovPruneError, match="layer 1 is merged"):
        make_compact(small, Cuts(merged={1: (W, bias)}))


def test_the_folder(done: Compressed, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    report = write_factored(done, tokenizer, tmp_path / "small", "small", {"other.json": done.report})
    folder = tmp_path / "small"
    assert CompressionReport.load(folder / REPORT).to_json() == report.to_json()
    assert CompressionReport.load(folder / "other.json").packed is None
    gate = GateReport.load(folder / GATE)
    assert gate.passed
    assert [check.name for check in gate.checks] == [
        "factors within rounding",
        "same as products by hooks",
        "cached decoding",
        "reloads as saved",
        "fell by what was removed",
        "reloads without this package",
    ]
    tensors = load_file(folder / "model.safetensors")
    assert report.packed is not None
    assert report.packed.bytes == sum(t.nbytes for t in tensors.values())
    assert report.packed.dense_bytes == 4 * done.model.num_parameters()
    assert report.packed.factored == len(report.matrices)
    assert (folder / MODULE).is_file()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"Stored as two factors of {len(report.matrices)} matrices (compact)" in card
    assert "trust_remote_code=True" in card
    assert [step.kind for step in read_history(folder).steps] == ["compress"]
    loaded = load(folder)
    assert type(loaded.model) is CompactLlama
    assert identify(loaded.model).weights == identify(with_factors(done.model, done.report.ranks)).weights


# Planted faults.


def other_numbers(small: PreTrainedModel) -> None:
    small.get_submodule(Q).left[0].weight.data *= 1.01  # type: ignore[union-attr, index]


def swapped(small: PreTrainedModel) -> None:
    layer: Any = find_layers(small).layers[1]
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def another_norm(small: PreTrainedModel) -> None:
    norm: Any = find_layers(small).layers[3].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight + 0.01)


def a_bias(small: PreTrainedModel) -> None:
    left: Any = small.get_submodule(Q).left[0]  # type: ignore[union-attr, index]
    left.bias = torch.nn.Parameter(torch.full((32,), 0.1))


def a_cache_that_forgets(small: PreTrainedModel) -> None:
    attention: Any = find_layers(small).layers[2].self_attn
    attention.layer_idx = 1


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (other_numbers, r"factors within rounding.*layers\.1\.self_attn\.q_proj"),
        (swapped, r"factors within rounding.*layers\.1\.mlp"),
        (another_norm, "products by hooks"),
        (a_bias, "products by hooks"),
        (a_cache_that_forgets, "cached decoding"),
    ],
)
def test_a_fault_in_the_model_is_caught(
    spoil: Callable[[PreTrainedModel], None],
    told: str,
    done: Compressed,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here_alone: None,
) -> None:
    def wrong(model: PreTrainedModel, ranks: Any) -> PreTrainedModel:
        small = with_factors(model, ranks)
        spoil(small)
        return small

    monkeypatch.setattr(factored, "with_factors", wrong)
    with pytest.raises(CheckFailed, match=f"{told}"):
        write_factored(done, tokenizer, tmp_path / "small", "small")
    assert list(tmp_path.iterdir()) == []


def one_bit(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    R = tensors[f"{Q}.right.weight"]
    R[0, 0] = R[0, 0].nextafter(torch.tensor(10.0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def one_lost(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{Q}.right.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def one_more(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({"more": torch.zeros(2)}, folder / "more.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (one_bit, "right.weight"),
        (one_lost, "missing keys"),
        (one_more, "bytes saved"),
    ],
)
def test_a_fault_in_the_files_is_caught(
    spoil: Callable[[Path], None], told: str, done: Compressed, tmp_path: Path
) -> None:
    small = with_factors(done.model, done.report.ranks)
    small.save_pretrained(tmp_path)
    spoil(tmp_path)
    where = find_factored(done.model, done.report.ranks)
    gate = verify_factored(done.model, small, where, tmp_path, elsewhere=False)
    assert told in gate.failure()


def test_a_matrix_that_is_not_of_the_rank_it_says_fails(
    done: Compressed, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, here_alone: None
) -> None:
    other = compress(done.model, method="magnitude", sparsity=0.5).model  # of full rank again
    with pytest.raises(CheckFailed, match="factors within rounding"):
        write_factored(Compressed(other, done.report), tokenizer, tmp_path / "small", "small")
    assert list(tmp_path.iterdir()) == []


# What is refused, before and on loading.


def test_other_methods_are_refused(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for method in ("wanda", "rtn"):
        with pytest.raises(LyapunovPruneError, match=f"result of {method}"):
            FORMATS.make("compact").require_method(Asked(method))
    with pytest.raises(LyapunovPruneError, match="result of magnitude"):
        write_factored(compress(reader, method="magnitude", sparsity=0.5), tokenizer, tmp_path / "small", "small")
    (tmp_path / "mine").write_text("")
    with pytest.raises(LyapunovPruneError, match="is not empty"):
        write_factored(compress(reader, method="svd", rank=2), tokenizer, tmp_path, "small")


@pytest.mark.parametrize(
    "form", ["low-rank 32:5", "low-rank 32:99999999", "low-rank 31:5", "low-rank", "lower-rank 1:2"]
)
def test_a_config_that_is_not_of_the_weights_is_one_line(
    form: str, done: Compressed, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, here_alone: None
) -> None:
    write_factored(done, tokenizer, tmp_path / "small", "small")

    file = tmp_path / "small" / "config.json"
    cuts = json.loads(file.read_text())["cuts"]
    cuts[1]["self_attn.q_proj"] = form
    edit_json(file, cuts=cuts)
    with pytest.raises(LyapunovPruneError, match=r"fetch it again"):
        load(tmp_path / "small")


def test_ranks_are_read_from_the_config(done: Compressed, tmp_path: Path) -> None:
    with_factors(done.model, done.report.ranks).save_pretrained(tmp_path)
    cuts = json.loads((tmp_path / "config.json").read_text())["cuts"]
    (each,) = [each for each in find_factored(done.model, done.report.ranks) if each.module == Q]
    assert isinstance(each, Factored)
    assert cuts[1]["self_attn.q_proj"] == each.form == f"low-rank 32:{done.report.ranks[Q]}"
