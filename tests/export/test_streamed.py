"""A streamed model compressed layer by layer onto the disk is the one that is compressed in memory and saved."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import KINDS, edit_json, make_small, make_tiny, saved
from packed_files import Spoil, one_integer, one_lost, one_scale, spoil_what_is_packed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.checkpoints import layer_stream as streaming
from lyapunov_prune.checkpoints import saving
from lyapunov_prune.checkpoints.outline import Outline
from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.checkpoints.saving import write_model
from lyapunov_prune.compression import CompressionReport
from lyapunov_prune.compression.report import REPORT
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export.packed import Packing, write_packed
from lyapunov_prune.export.streamed import compress_on_disk
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.size import model_size
from lyapunov_prune.models.streamed import stream_of
from lyapunov_prune.models.structure import find_structure, identify
from lyapunov_prune.results.history import read_history

# Each kind of what a method looks at: nothing, norms, Gram matrices, gradients.
WAYS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude", "sparsity": 0.5},
    "wanda": {"method": "wanda", "pattern": "2:4"},
    "sparsegpt": {"method": "sparsegpt", "sparsity": 0.5},
    "balanced": {"method": "balanced", "rank": 4},
    "rtn": {"method": "rtn", "bits": 4, "group_size": 16},
}


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row after the other goes through a layer."""
    monkeypatch.setattr(streaming, "TOKENS", 1)


@pytest.fixture
def here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that takes seconds to start."""
    passed = GateCheck("reloads without this package", True, 0.0, 1.0, "not run: it takes seconds")
    monkeypatch.setattr(saving, "elsewhere_check", lambda *_: passed)


def both(folder: Path, ids: torch.Tensor | None, **how: Any) -> tuple[CompressionReport, CompressionReport]:
    """The reports of a compression in memory, saved as `whole`, and of a streamed one, in `apart`, beside `folder`."""
    loaded, layers = load(folder), lp.load_streamed(folder)
    done = lp.compress(loaded.model, ids, **how)
    title, about = "tiny, compressed", done.report.about()
    write_model(done.model, loaded.tokenizer, folder.parent / "whole", {REPORT: done.report}, title, about)
    report = compress_on_disk(layers.model, layers.tokenizer, folder.parent / "apart", ids, **how)
    assert not any(p.is_meta is False for p in find_structure(layers.model).layers.parameters())
    return done.report, report


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same(folder: Path, whole: CompressionReport, apart: CompressionReport) -> None:
    wanted, found = (tensors(folder.parent / name) for name in ("whole", "apart"))
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
        assert ((found[name] == 0) == (tensor == 0)).all(), name
    for a, b in zip(whole.matrices, apart.matrices, strict=True):
        assert (a.name, a.amount, a.zeros, a.rank, a.bits) == (b.name, b.amount, b.zeros, b.rank, b.bits)
        np.testing.assert_allclose(
            [b.weight_error, b.output_error or 0], [a.weight_error, a.output_error or 0], rtol=1e-4, atol=1e-6
        )
    assert whole.calibration == apart.calibration
    assert whole.allocation.model == apart.allocation.model


# Every way on layers of Linear and of Conv1D; on the other kinds, one that looks at most (norms are the diagonal of a
# Gram matrix). families/test_streamed.py compresses every decoder.
@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in KINDS for way in (WAYS if family in ("llama", "gpt2") else ("sparsegpt",))],
)
def test_every_kind_of_layer_is_compressed_as_in_memory(
    way: str, family: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_tiny(family, num_hidden_layers=3), tokenizer, tmp_path / "tiny")
    assert_same(folder, *both(folder, ids, **WAYS[way]))
    a, b = (load(tmp_path / name).model for name in ("whole", "apart"))
    with torch.no_grad():
        torch.testing.assert_close(b(ids).logits, a(ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "falcon", "bloom", "jamba"])
def test_fused_experts_and_other_matrices_are_written_as_transformers_names_them(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_zoo(name), tokenizer, tmp_path / "tiny")
    assert_same(folder, *both(folder, None, **WAYS["magnitude"]))


@pytest.mark.parametrize(("name", "way"), [("llama", "sparsegpt"), ("gpt2", "balanced"), ("opt", "sparsegpt")])
def test_what_compact_layers_have_left_is_compressed_as_in_memory(
    name: str, way: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, here_alone: None
) -> None:
    folder = saved(make_small(name), tokenizer, tmp_path / "tiny")
    assert_same(folder, *both(folder, ids, **WAYS[way]))
    whole, apart = ((tmp_path / each / MODULE).read_bytes() for each in ("whole", "apart"))
    assert whole == apart


def test_schedules_share_out_the_same(ids: torch.Tensor, checkpoint: Path) -> None:
    whole, apart = both(checkpoint, ids, allocation="atp", method="wanda", sparsity=0.5)
    np.testing.assert_allclose(apart.allocation.amount, whole.allocation.amount, rtol=1e-5)
    given = compress_on_disk(
        *streamed(checkpoint), checkpoint.parent / "given", ids, method="wanda", allocation=whole.allocation
    )
    assert given.allocation.amount.tolist() == whole.allocation.amount.tolist()


def streamed(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    loaded: Any = lp.load_streamed(folder)
    return loaded.model, loaded.tokenizer


def test_the_folder_says_how_it_was_made(ids: torch.Tensor, checkpoint: Path) -> None:
    both(checkpoint, ids, **WAYS["wanda"])
    whole, apart = (checkpoint.parent / name for name in ("whole", "apart"))
    weights = {file.name for folder in (whole, apart) for file in folder.glob("model*")}
    names = [{file.name for file in folder.iterdir()} - weights for folder in (whole, apart)]
    assert names[0] == names[1]
    for name in names[0] - {REPORT, "history.json", "README.md"}:
        assert (whole / name).read_bytes() == (apart / name).read_bytes()
    cards = [(folder / "README.md").read_text().splitlines() for folder in (whole, apart)]
    assert [line for line, other in zip(*cards, strict=True) if line != other and "bits a weight" not in line] == []
    assert read_history(apart) == read_history(whole)
    assert CompressionReport.load(apart / REPORT).matrices
    assert identify(load(apart).model).same_as(identify(load(whole).model))


def test_layers_are_read_once_and_held_one_at_a_time(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = streamed(checkpoint)
    reads, files, fill, save = list[str](), list[int](), Outline.fill, saving.save_file

    def written(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        files.append(sum(not layer.mlp.up_proj.weight.is_meta for layer in find_structure(model).layers))
        save(tensors, *rest)

    monkeypatch.setattr(Outline, "fill", lambda self, memory, name: reads.append(name) or fill(self, memory, name))
    monkeypatch.setattr(saving, "save_file", written)
    compress_on_disk(model, tokenizer, checkpoint.parent / "out", ids, **WAYS["wanda"])
    inside = find_structure(model).layers_path
    assert sorted(reads) == sorted(name for name in model.state_dict() if name.startswith(inside))
    assert files == [0, 1, 1, 1, 1, 1, 1]


# What cannot be done, or goes wrong on the way.


def test_what_cannot_be_streamed_is_refused_before_anything_runs(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = streamed(checkpoint)
    stream: Any = stream_of(model)
    before, out = stream.passes, checkpoint.parent / "out"
    for how, message in (
        ({"method": "wanda", "sparsity": 0.5, "bits": 4}, "sparsity and bits"),
        ({"method": "svd"}, "needs an amount"),
    ):
        with pytest.raises(LyapunovPruneError, match=message):
            compress_on_disk(model, tokenizer, out, ids, **how)
    with pytest.raises(LyapunovPruneError, match=r"wanda.*calibration"):
        compress_on_disk(model, tokenizer, out, **WAYS["wanda"])
    with pytest.raises(LyapunovPruneError, match="takes a streamed model"):
        compress_on_disk(load(checkpoint).model, tokenizer, out, ids, **WAYS["wanda"])
    with pytest.raises(LyapunovPruneError, match="not empty"):
        compress_on_disk(model, tokenizer, checkpoint, ids, **WAYS["wanda"])
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100_000))
    with pytest.raises(LyapunovPruneError, match=r"need [\d,]+ bytes .* 100,000"):
        compress_on_disk(model, tokenizer, out, ids, **WAYS["wanda"])
    assert stream.passes == before
    assert not out.exists()


@pytest.mark.parametrize("fault", ["a bit", "a tensor", "a setting"])
def test_files_that_hold_another_model_are_not_left(
    fault: str, checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = streamed(checkpoint)

    def spoiled(tensors: dict[str, torch.Tensor], file: Path, *rest: Any) -> None:
        name = "model.layers.2.mlp.up_proj.weight"
        if name in tensors and fault == "a bit":
            tensors[name].view(torch.int32)[0, 0] ^= 1
        if name in tensors and fault == "a tensor":
            del tensors[name]
        save_file(tensors, file, *rest)

    monkeypatch.setattr(saving, "save_file", spoiled)
    if fault == "a setting":
        find_structure(model).layers[2].self_attn.scaling *= 2  # type: ignore[union-attr, operator]
    with pytest.raises(CheckFailed, match="take the model in memory"):
        compress_on_disk(model, tokenizer, checkpoint.parent / "out", ids, **WAYS["magnitude"])
    assert [path.name for path in checkpoint.parent.iterdir()] == ["tiny"]


def test_a_layer_that_is_not_finite_leaves_nothing(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    model: Any = make_tiny("llama")
    model.model.layers[3].mlp.up_proj.weight.data.fill_(float("inf"))
    apart = streamed(saved(model, tokenizer, tmp_path / "tiny"))
    with pytest.raises(LyapunovPruneError, match="NaN or infin"):
        compress_on_disk(*apart, tmp_path / "out", ids, **WAYS["wanda"])
    assert not (tmp_path / "out").exists()
    assert all(p.is_meta for p in find_structure(apart[0]).layers.parameters())


# Packed.

ROUNDED: dict[str, Any] = {"method": "rtn", "bits": 4, "symmetric": True}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi3", "opt"])
def test_packed_files_hold_what_those_of_memory_do(
    name: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_tiny(name, num_hidden_layers=2), tokenizer, tmp_path / "tiny")
    for more in ({"bits": 4}, {"bits": 8, "group_size": 8}):
        how, whole, apart = ROUNDED | more, tmp_path / f"whole-{more['bits']}", tmp_path / f"apart-{more['bits']}"
        loaded = load(folder)
        report = write_packed(
            loaded.model, lp.compress(loaded.model, **how), loaded.tokenizer, whole, "tiny, compressed"
        )
        found = compress_on_disk(*streamed(folder), apart, format="packed", **how)
        wanted, written = tensors(whole), tensors(apart)
        assert wanted.keys() == written.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in wanted.items())
        assert (apart / "config.json").read_text() == (whole / "config.json").read_text()
        assert found.matrices == report.matrices
        assert found.packed is not None
        assert report.packed is not None
        assert found.packed.dense_bytes == report.packed.dense_bytes
        plain = AutoModelForCausalLM.from_pretrained(apart).eval()
        with torch.no_grad():
            assert torch.equal(plain(ids).logits, load(whole).model(ids).logits)


def test_what_gptq_rounds_is_packed_as_it_is_written_dense(
    ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_tiny("llama"), tokenizer, tmp_path / "tiny")
    how: dict[str, Any] = {"method": "gptq", "bits": 4, "group_size": 8, "symmetric": True}
    compress_on_disk(*streamed(folder), tmp_path / "dense", ids, **how)
    found = compress_on_disk(*streamed(folder), tmp_path / "packed", ids, format="packed", **how)
    dense, again = load(tmp_path / "dense").model, load(tmp_path / "packed").model
    for p in find_projections(wrap(dense)):
        assert torch.equal(p.weight(again), p.weight(dense)), p.name
    assert all(matrix.output_error is not None for matrix in found.matrices)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (one_integer, "other weights than"),
        (one_scale, "other weights than"),
        (one_lost, r"o_proj\.weight_packed .*\(0, 0\)"),
    ],
)
def test_a_fault_in_what_is_packed_leaves_nothing(
    spoil: Spoil, told: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_what_is_packed(monkeypatch, spoil)
    with pytest.raises(CheckFailed, match=f"nothing written: .*({told})"):
        compress_on_disk(*streamed(checkpoint), checkpoint.parent / "out", format="packed", **ROUNDED)
    assert not (checkpoint.parent / "out").exists()


def test_a_config_that_names_a_dense_matrix_as_packed_leaves_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unpacked on loading is the same; the model that runs packed would miss its integers."""
    write = Packing.write_config

    def wrong(self: Packing, folder: Path, model: PreTrainedModel) -> None:
        write(self, folder, model)
        config = json.loads((folder / "config.json").read_text())
        edit_json(folder / "config.json", quantization_config=config["quantization_config"] | {"ignore": []})

    monkeypatch.setattr(Packing, "write_config", wrong)
    with pytest.raises(CheckFailed, match=r"3 missing keys.*lm_head\.weight_packed"):
        compress_on_disk(*streamed(checkpoint), checkpoint.parent / "out", format="packed", **ROUNDED)
    assert not (checkpoint.parent / "out").exists()


def test_what_is_packed_needs_the_disk_of_what_is_packed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(checkpoint).model
    room = model_size(loaded).bytes // 2
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(room))
    with pytest.raises(LyapunovPruneError, match="bytes of disk"):
        compress_on_disk(*streamed(checkpoint), checkpoint.parent / "out", **ROUNDED)
    compress_on_disk(*streamed(checkpoint), checkpoint.parent / "out", format="packed", **ROUNDED)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"method": "wanda", "sparsity": 0.5}, "not those of wanda"),
        ({"method": "rtn", "bits": 4}, "give symmetric"),
        ({"method": "rtn", "bits": 3, "symmetric": True}, "not 3 bits"),
        ({"method": "magnitude", "pattern": "2:4"}, "not those of magnitude"),
        ({**ROUNDED, "group_size": 5}, "groups of 5"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_read(
    how: dict[str, Any], told: str, checkpoint: Path
) -> None:
    model, tokenizer = streamed(checkpoint)
    passes = stream_of(model).passes  # type: ignore[union-attr]
    with pytest.raises(LyapunovPruneError, match=told):
        compress_on_disk(model, tokenizer, checkpoint.parent / "out", format="packed", **how)
    assert stream_of(model).passes == passes  # type: ignore[union-attr]


def test_rows_that_end_within_a_word_are_packed_by_groups(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Without groups the library guesses their width where no number is read."""
    folder = saved(make_tiny("llama", intermediate_size=44), tokenizer, tmp_path / "tiny")
    with pytest.raises(LyapunovPruneError, match=r"44 inputs.*down_proj.*4 bits"):
        compress_on_disk(*streamed(folder), tmp_path / "out", format="packed", **ROUNDED)
    compress_on_disk(*streamed(folder), tmp_path / "out", format="packed", group_size=4, **ROUNDED)
    assert identify(lp.load_streamed(tmp_path / "out").model).same_as(identify(load(tmp_path / "out").model))


@pytest.mark.parametrize(
    ("option", "told"), [({"weighted": True}, "all of them in memory"), ({"correction": 0.5}, "beside")]
)
def test_what_needs_the_whole_dense_model_is_refused(option: dict[str, Any], told: str, checkpoint: Path) -> None:
    model, tokenizer = streamed(checkpoint)
    ids = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(0))
    with pytest.raises(LyapunovPruneError, match=told):
        compress_on_disk(model, tokenizer, checkpoint.parent / "out", ids, method="gptq", bits=4, **option)
    assert not (checkpoint.parent / "out").exists()
