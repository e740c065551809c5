"""Rounded weights, packed: plain transformers unpacks the very weights that rtn gives, or nothing is written."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from families.zoo import make_zoo
from helpers import KINDS, make_tiny, moe
from packed_files import Spoil, one_integer, one_lost, one_scale, spoil_what_is_packed, symmetric_grid, zeros
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import compress
from lyapunov_prune.compression import CompressionReport
from lyapunov_prune.compression.compress import Compressed
from lyapunov_prune.compression.report import REPORT
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import packed
from lyapunov_prune.export.packed import Packing, Scheme, require_packable, require_packed_options, write_packed
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.readers.compressed_tensors import PACK
from lyapunov_prune.results.history import HISTORY, read_history

ROUNDED: dict[str, Any] = {"method": "rtn", "bits": 4, "symmetric": True}
FAMILIES = [name for name in KINDS if not name.startswith("gpt2")]


def written(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path, **changes: Any) -> Compressed:
    done = compress(model, **{**ROUNDED, **changes})
    write_packed(model, done, tokenizer, target, "packed")
    return done


def plainly(folder: Path, ids: torch.Tensor, **options: Any) -> tuple[PreTrainedModel, torch.Tensor]:
    """What transformers alone makes of a folder, and its logits; the forward unpacks the weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model, model(ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_unpacks_what_rtn_gives(
    family: str, tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = make_tiny(family, num_hidden_layers=2)
    for bits, group_size in ((4, None), (8, 8)):
        done = written(model, tokenizer, tmp_path / str(bits), bits=bits, group_size=group_size)
        again, logits = plainly(tmp_path / str(bits), ids)
        for p in find_projections(wrap(model)):
            W = symmetric_grid(p.weight(model), bits, group_size).values()
            assert torch.equal(p.weight(done.model), W), p.name
            assert torch.equal(p.weight(again), W), p.name
        with torch.no_grad():
            assert torch.equal(logits, done.model(ids).logits)


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"), [(4, None, torch.float32), (4, 8, torch.bfloat16), (8, 16, torch.float32)]
)
def test_what_gptq_rounds_packs_as_what_rtn_does(
    bits: int,
    group_size: int | None,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerFast,
    ids: torch.Tensor,
    tmp_path: Path,
) -> None:
    model = make_tiny("llama", num_hidden_layers=2).to(dtype)
    how: dict[str, Any] = {"bits": bits, "group_size": group_size, "symmetric": True}
    done, nearest = compress(model, ids, method="gptq", **how), compress(model, method="rtn", **how)
    write_packed(model, done, tokenizer, tmp_path / "small", "packed")
    again, logits = plainly(tmp_path / "small", ids)
    for p in find_projections(wrap(model)):
        assert torch.equal(p.weight(again), p.weight(done.model)), p.name
        assert not torch.equal(p.weight(again), p.weight(nearest.model)), p.name
    if dtype == torch.float32:
        with torch.no_grad():
            assert torch.equal(logits, done.model(ids).logits)


@pytest.mark.parametrize("family", ["llama", "phi3", "opt"])
def test_unequal_bits_load_in_plain_transformers(
    family: str, tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Each layer of its own width, one left as it is: the weights to the last bit, and the logits."""
    model = make_tiny(family)
    uniform = compress(model, **ROUNDED).report.allocation
    widths = np.array([2.0, 3.0, 4.0, 8.0, 16.0, 5.0])
    allocation = replace(uniform, schedule="by hand", amount=widths[list(uniform.layers)])
    done = compress(model, method="rtn", allocation=allocation, group_size=8, symmetric=True)
    write_packed(model, done, tokenizer, tmp_path / "small", "packed")
    groups = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(group["weights"]["num_bits"] for group in groups.values()) == [2, 3, 4, 5, 8]
    again, logits = plainly(tmp_path / "small", ids)
    for p in find_projections(wrap(model)):
        W = p.weight(done.model)
        assert torch.equal(p.weight(again), W), p.name
        assert torch.equal(W, p.weight(model)) == (p.layer == 4), p.name
    with torch.no_grad():
        assert torch.equal(logits, done.model(ids).logits)
    loaded = load(tmp_path / "small").model
    for p in find_projections(wrap(model)):
        assert torch.equal(p.weight(loaded), p.weight(done.model)), p.name
    with torch.no_grad():
        assert torch.equal(logits, loaded(ids).logits)
    held = sum(tensor.nbytes for tensor in load_file(tmp_path / "small" / "model.safetensors").values())
    packing = Packing(packed._schemes(find_projections(wrap(model)), allocation, 8))
    assert packing.size(model) == held


def test_a_model_that_transformers_cannot_load_packed_is_not_written(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_zoo("olmo_hybrid")  # its loader joins matrices, which it cannot do with packed ones
    done = compress(model, **ROUNDED)
    with pytest.raises(CheckFailed):
        write_packed(model, done, tokenizer, tmp_path / "small", "packed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_and_tied_embeddings(
    tied: bool, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = make_tiny("llama", tie_word_embeddings=tied).to(dtype)
    before = model.model.embed_tokens.weight.clone()
    done = written(model, tokenizer, tmp_path / "small")
    held = sum(tensor.nbytes for tensor in load_file(tmp_path / "small" / "model.safetensors").values())
    assert Packing({p.module: Scheme(4) for p in find_projections(wrap(model))}).size(model) == held
    again, _ = plainly(tmp_path / "small", ids)
    assert again.dtype == dtype
    assert torch.equal(again.lm_head.weight, done.model.lm_head.weight)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(again.model.embed_tokens.weight, before)
    for p in find_projections(wrap(model)):
        assert torch.equal(p.weight(again), p.weight(done.model)), p.name
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not tied)


def test_the_files_hold_the_integers_and_scales_of_the_grid(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_tiny("llama")
    for bits, group_size in ((4, None), (4, 8), (8, None), (8, 16)):
        folder = tmp_path / f"{bits}-{group_size}"
        written(model, tokenizer, folder, bits=bits, group_size=group_size)
        tensors = load_file(folder / "model.safetensors")
        for p in find_projections(wrap(model)):
            q, scale = symmetric_grid(p.weight(model), bits, group_size)
            assert torch.equal(unpack_from_int32(tensors[f"{p.module}.weight_packed"], bits, q.shape), q)
            assert torch.equal(tensors[f"{p.module}.weight_scale"], scale)
            assert tensors[f"{p.module}.weight_shape"].tolist() == list(q.shape)
            assert f"{p.module}.weight" not in tensors
            assert tensors[f"{p.module}.weight_packed"].nbytes == q.numel() * bits // 8


def test_the_folder_says_what_it_is_and_how_large(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_tiny("llama")
    done = compress(model, **ROUNDED)
    report = write_packed(model, done, tokenizer, tmp_path / "small", "packed")
    assert CompressionReport.load(tmp_path / "small" / REPORT).to_json() == report.to_json()
    assert report.packed is not None
    assert report.packed.bytes == (tmp_path / "small" / "model.safetensors").stat().st_size
    model.save_pretrained(tmp_path / "dense")
    dense = (tmp_path / "dense" / "model.safetensors").stat().st_size
    assert 0 < dense - report.packed.dense_bytes < 8192  # the header
    assert report.packed.bytes < 0.4 * dense
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "rtn, symmetric" in card
    assert f"{report.packed.bytes / report.packed.dense_bytes:.3f} of the" in card
    assert "pip install compressed-tensors" in card
    assert ("vllm serve" in card, "llama-cli" in card) == (True, False)  # no GGUF file is made of packed weights
    assert "dense matrices" not in card
    steps = read_history(tmp_path / "small").steps
    assert [step.kind for step in steps] == ["compress"]
    assert (tmp_path / "small" / HISTORY).is_file()
    assert (tmp_path / "small" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (one_integer, r"model\.layers\.5\.mlp\.down_proj.*unpacked"),
        (one_scale, r"model\.layers\.0\.self_attn\.q_proj.*unpacked"),
        (one_lost, r"missing keys.*o_proj\.weight_scale"),
        (zeros, "o_proj.*unpacked"),
    ],
)
def test_a_fault_in_what_is_packed_is_caught(
    spoil: Spoil,
    told: str,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_what_is_packed(monkeypatch, spoil)
    with pytest.raises(CheckFailed, match=f"{told}"):
        written(make_tiny("llama"), tokenizer, tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_of_the_grid_are_not_packed(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_tiny("llama")
    done = compress(model, **ROUNDED)
    W = done.model.model.layers[2].mlp.up_proj.weight
    with torch.no_grad():
        W[0, 0] = W[0, 0].nextafter(torch.tensor(10.0))
    with pytest.raises(CheckFailed, match=r"model\.layers\.2\.mlp\.up_proj"):
        write_packed(model, done, tokenizer, tmp_path / "small", "packed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("wanda", None, False, "uniform"), "not those of wanda"),
        (("rtn", 3, True, "uniform"), "not 3 bits"),
        (("rtn", 1.58, True, "uniform"), r"not 1\.58 bits"),
        (("awq", 4, True, "uniform"), "not those of awq"),
        (("rtn", None, True, "uniform"), "not no bits"),
        (("rtn", 4.5, True, "uniform"), r"not 4\.5 bits"),
        (("rtn", None, True, "atp"), "by atp"),
        (("rtn", 4, False, "uniform"), "give symmetric"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(options: tuple[Any, ...], told: str) -> None:
    with pytest.raises(LyapunovPruneError, match=told):
        require_packed_options(*options)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)  # as if it were not installed
    with pytest.raises(LyapunovPruneError, match=r"lyapunov-prune\[packed\]"):
        require_packed_options("rtn", 4, True, "uniform")


def test_models_whose_matrices_are_no_linear_modules_are_refused() -> None:
    with pytest.raises(LyapunovPruneError, match=r"attn\.c_attn.*Conv1D"):
        require_packable(make_tiny("gpt2"), None)
    with pytest.raises(LyapunovPruneError, match=r"mlp\.experts.*one tensor"):
        require_packable(moe("mixtral"), None)


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_a_model_that_transformers_does_not_build_packed_is_refused(name: str) -> None:
    """When this fails, its code initialises a matrix that is packed no more: docs/compression.md says that it does."""
    with pytest.raises(LyapunovPruneError, match="has no attribute"):
        require_packable(make_zoo(name), None)


def test_a_pattern_of_zeros_is_refused_as_nothing_packs_it() -> None:
    """When this fails, compressed-tensors packs 2:4 patterns again: docs/compression.md says that it does not."""
    with pytest.raises(LyapunovPruneError, match="not those of magnitude"):
        require_packed_options("magnitude", None, False, "uniform")
    formats = BaseCompressor.registered_names()
    assert PACK in formats
    assert not [name for name in formats if "sparse" in name or "24" in name]
