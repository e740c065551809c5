"""Layer removal on disk: the very files that removal in memory writes, or a refusal; whole or not at all."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import REMOVE, VOCABULARY, limit_file_size, linked, make_small, make_tiny, on_disk, saved, tensors
from packed_files import pack_others, pack_with_zero_points
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, modeling_utils

from lyapunov_prune.checkpoints import tensor_files
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.checkpoints.tensor_files import TensorPiece, read_tensors
from lyapunov_prune.cli.app import main
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError, NonFiniteError
from lyapunov_prune.export import copied as shards
from lyapunov_prune.export.copied import prune_on_disk, too_large
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.export.quantised_copy import read_quantised
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation
from lyapunov_prune.models import device
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning import counting
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.pruning.removed import PartsGone


def configs(folder: Path) -> dict[str, Any]:
    return {name: json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")}


# The same as in memory.


# families/test_on_disk.py copies every decoder.
@pytest.mark.parametrize(
    ("name", "shard"), [("llama", "5GB"), ("opt", "5GB"), *((name, "20KB") for name in ("llama", "gemma3", "phi3"))]
)
def test_the_files_are_those_that_removal_in_memory_writes(
    name: str, shard: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source, memory, disk = tmp_path / "source", tmp_path / "memory", tmp_path / "disk"
    model = make_tiny(name, vocab_size=len(VOCABULARY))
    model.save_pretrained(source, max_shard_size=shard)
    tokenizer.save_pretrained(source)
    loaded = load(source)
    write_pruned(loaded.model, loaded.tokenizer, PruningPlan.given(loaded.model, REMOVE), memory)
    on_disk(source, disk, shard_bytes=5 * 10**9 if shard == "5GB" else 20_000)
    assert len(list(disk.glob("*.safetensors"))) > 3 or shard == "5GB"
    assert tensors(disk) == tensors(memory)
    assert configs(disk) == configs(memory)
    assert {p.name for p in disk.iterdir()} >= {p.name for p in memory.iterdir() if p.suffix != ".safetensors"}
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = remove_layers(loaded.model, REMOVE)(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(disk)(ids).logits, wanted)


def test_a_checkpoint_without_the_prefix_and_with_a_stranger_is_pruned(checkpoint: Path, tmp_path: Path) -> None:
    """As old checkpoints of a bare backbone are, and as trainers leave tensors behind."""
    weights = load_file(checkpoint / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare | {"optimizer.5.step": torch.zeros(3)}, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(LyapunovPruneError, match="1 of optimizer"):
        on_disk(checkpoint, tmp_path / "disk")
    outline = read_outline(checkpoint, checkpoint, text_only=True)
    prune_on_disk(outline, PruningPlan.given(outline.identity, REMOVE), tmp_path / "disk")
    written = load_file(tmp_path / "disk" / "model.safetensors")
    assert {name for name in written if "up_proj" in name} == {f"layers.{i}.mlp.up_proj.weight" for i in range(4)}
    assert "optimizer.5.step" not in written
    for new, old in enumerate((0, 2, 3, 5)):
        assert torch.equal(
            written[f"layers.{new}.mlp.up_proj.weight"], weights[f"model.layers.{old}.mlp.up_proj.weight"]
        )


def test_files_that_the_index_does_not_name_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(1)}, checkpoint / "consolidated.safetensors")
    on_disk(checkpoint, tmp_path / "disk")
    assert "consolidated.safetensors" not in os.listdir(tmp_path / "disk")


@pytest.mark.parametrize(("name", "remove"), [("llama", (0, 1)), *((n, (2, 4)) for n in ("gemma3", "gpt_neox", "opt"))])
def test_compact_layers_are_removed_and_the_list_of_what_they_lost_follows(
    name: str, remove: tuple[int, ...], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source, memory, disk = tmp_path / "source", tmp_path / "memory", tmp_path / "disk"
    saved(make_small(name, vocab_size=len(VOCABULARY)), tokenizer, source)
    loaded = load(source)
    write_pruned(loaded.model, loaded.tokenizer, PruningPlan.given(loaded.model, remove), memory)
    written = on_disk(source, disk, remove, stream=True)
    assert written.gate.passed
    assert tensors(disk) == tensors(memory)
    assert configs(disk) == configs(memory)
    assert (disk / MODULE).read_bytes() == (memory / MODULE).read_bytes()


def test_a_list_that_does_not_follow_fails_the_gate(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make_small("llama", vocab_size=len(VOCABULARY)), tokenizer, tmp_path / "source")
    right = shards.cut_outline

    def turned(*given: Any) -> Any:
        edit = right(*given)
        edit.made.model.config.cuts = edit.made.model.config.cuts[::-1]
        return edit

    monkeypatch.setattr(shards, "cut_outline", turned)
    with pytest.raises(CheckFailed, match="the copy fails the removal check"):
        on_disk(tmp_path / "source", tmp_path / "disk", (0,))
    assert not (tmp_path / "disk").exists()


# Packed integers, which are copied as they are.


@pytest.mark.parametrize(
    ("name", "stream"), [*((n, True) for n in ("llama", "gemma2", "phi3", "opt", "mixtral")), ("llama", False)]
)
def test_packed_layers_are_removed_and_their_names_follow(
    name: str, stream: bool, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source, model = tmp_path / "source", make_zoo("mixtral") if name == "mixtral" else make_tiny(name)
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    pack_others(source, "block_sparse_moe.gate.", ".1.self_attn.o_proj", ".3.self_attn.o_proj")
    on_disk(source, tmp_path / "disk", (0, 1), stream=stream)
    config = json.loads((tmp_path / "disk" / "config.json").read_text())["quantization_config"]
    assert [name for name in config["ignore"] if "o_proj" in name] == (
        [] if name == "opt" else ["model.layers.1.self_attn.o_proj"]
    )
    before = {name: t for name, t in tensors(source).items() if ".layers." in name}
    after = {name: t for name, t in tensors(tmp_path / "disk").items() if ".layers." in name}
    prefix = next(iter(before)).partition("layers.")[0] + "layers."
    kept = range(2, len(find_structure(model).layers))
    assert after == {
        name.replace(f"{prefix}{old}.", f"{prefix}{new}."): tensor
        for new, old in enumerate(kept)
        for name, tensor in before.items()
        if name.startswith(f"{prefix}{old}.")
    }
    whole = load(source).model
    with torch.no_grad():
        with skipped(find_structure(whole), (0, 1)):
            wanted = whole(ids, use_cache=False).logits
        for found in (load(tmp_path / "disk").model, AutoModelForCausalLM.from_pretrained(tmp_path / "disk")):
            assert deviation(found(ids, use_cache=False).logits, wanted) <= SAME_LIMIT[torch.float32]


def test_layers_with_zero_points_are_removed(checkpoint: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    pack_with_zero_points(checkpoint)
    on_disk(checkpoint, tmp_path / "disk", (0, 1))
    whole = load(checkpoint).model
    with torch.no_grad(), skipped(find_structure(whole), (0, 1)):
        wanted = whole(ids, use_cache=False).logits
    with torch.no_grad():
        found = load(tmp_path / "disk").model(ids, use_cache=False).logits
    assert deviation(found, wanted) <= SAME_LIMIT[torch.float32]


def test_a_config_whose_names_stay_behind_fails_the_gate(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_others(checkpoint, ".3.self_attn.o_proj")
    monkeypatch.setattr(shards, "follow_layers", lambda *args: None)
    with pytest.raises(CheckFailed, match=r"o_proj\.weight_packed"):
        on_disk(checkpoint, tmp_path / "disk", (0,))
    assert not (tmp_path / "disk").exists()


def test_a_pattern_in_the_config_follows_its_layer(checkpoint: Path, tmp_path: Path) -> None:
    pack_others(checkpoint, ".3.self_attn.o_proj", ignore=["lm_head", r"re:.*layers\.3\..*o_proj"])
    on_disk(checkpoint, tmp_path / "disk", (0,))
    config = json.loads((tmp_path / "disk" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", r"re:.*layers\.2\..*o_proj"]


# The files that transformers itself would load, and none besides.


def decoys(folder: Path) -> None:
    """Other weights of the same names and shapes, wherever a guess might look."""
    other = {name: torch.ones_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").rename(folder / "true.safetensors")
    for name in ("model.safetensors", "other.safetensors", "model-00001-of-00001.safetensors"):
        save_file(other, folder / name, {"format": "pt"})
    for name, file in {"model.safetensors": "other.safetensors", "true.safetensors": "true.safetensors"}.items():
        index = {"metadata": {}, "weight_map": dict.fromkeys(other, file)}
        (folder / f"{name}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("named", "single"),
    [
        (None, False),
        ("true.safetensors", True),
        ("true.safetensors.index.json", True),
        ("other.safetensors", False),
    ],
)
def test_the_files_read_are_those_that_transformers_opens(
    named: str | None, single: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoys(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | ({"transformers_weights": named} if named else {})))
    if not single:
        (checkpoint / "model.safetensors").unlink()
    opened: set[Path] = set()

    def noted(file: Any, *args: Any, **options: Any) -> Any:
        opened.add(Path(file))
        return safe_open(file, *args, **options)

    with monkeypatch.context() as watched:
        watched.setattr(modeling_utils, "safe_open", noted)
        plain = AutoModelForCausalLM.from_pretrained(checkpoint, use_safetensors=True)
    assert {tensor.file for tensor in read_outline(checkpoint, checkpoint).stored.values()} == opened
    loaded = load(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), plain.parameters(), strict=True))
    write_pruned(loaded.model, loaded.tokenizer, PruningPlan.given(loaded.model, REMOVE), tmp_path / "memory")
    on_disk(checkpoint, tmp_path / "disk")
    assert tensors(tmp_path / "disk") == tensors(tmp_path / "memory")
    assert configs(tmp_path / "disk") == configs(tmp_path / "memory")
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = remove_layers(plain.eval(), REMOVE)(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "disk")(ids).logits, wanted)


@pytest.mark.parametrize("fault", ["a stale copy", "an overlay", "one elsewhere", "a stray file"])
def test_a_tensor_in_a_file_the_index_does_not_give_it_to_is_refused(
    fault: str, checkpoint: Path, tmp_path: Path
) -> None:
    """transformers took the copy of the last file, or the stray one, and no way of reading said a word."""
    state = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    norm = "model.norm.weight"
    files = {"b.safetensors": {norm: state.pop(norm)}, "m.safetensors": state}
    where = {key: file for file, held in files.items() for key in held}
    stale = {norm: 2 * files["b.safetensors"][norm]}
    if fault == "a stale copy":
        files["m.safetensors"] = state | stale
    elif fault == "an overlay":  # sorts first
        files["a.safetensors"], where["extra"] = stale | {"extra": torch.ones(1)}, "a.safetensors"
    elif fault == "one elsewhere":
        where |= {norm: "m.safetensors", "extra": "b.safetensors"}
    else:
        files["model.safetensors"] = {key: torch.zeros_like(t) for key, t in (state | stale).items()}
    for file, held in files.items():
        save_file(held, checkpoint / file, {"format": "pt"})
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    told = r"model\.safetensors" if fault == "a stray file" else r"model\.norm\.weight"
    for way in (load, load_streamed, lambda source: on_disk(source, tmp_path / "disk")):
        with pytest.raises(LyapunovPruneError, match=told):
            way(checkpoint)
    named_fp8(checkpoint)
    with pytest.raises(LyapunovPruneError, match=told):
        read_quantised(checkpoint, "x")


def named_fp8(folder: Path) -> None:
    """Say in the config that the weights are in fp8, whose layers are copied without a kernel."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_of_links_as_the_hub_s_cache_has_them_is_pruned(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "plain")
    linked(checkpoint)
    on_disk(tmp_path / "plain", tmp_path / "wanted")
    on_disk(checkpoint, tmp_path / "disk")
    assert tensors(tmp_path / "disk") == tensors(tmp_path / "wanted")
    assert not any(file.is_symlink() for file in (tmp_path / "disk").iterdir())


def test_a_link_that_leads_nowhere_has_no_size(checkpoint: Path) -> None:
    (checkpoint / "x.safetensors").symlink_to("nowhere")
    assert too_large(str(checkpoint)) is None


# Plans.


def test_a_plan_made_in_memory_is_accepted(checkpoint: Path, tmp_path: Path) -> None:
    plan = PruningPlan.given(load(checkpoint).model, REMOVE)
    assert prune_on_disk(read_outline(checkpoint, checkpoint), plan, tmp_path / "disk").plan == plan


def test_a_plan_made_in_memory_in_a_narrower_dtype_is_accepted(checkpoint: Path, tmp_path: Path) -> None:
    plan = PruningPlan.given(load(checkpoint, dtype="bfloat16").model, REMOVE)
    assert prune_on_disk(read_outline(checkpoint, checkpoint), plan, tmp_path / "disk").plan == plan


@pytest.mark.parametrize("name", ["model.layers.3.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_plan_from_before_a_weight_of_the_files_changed_is_refused(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    plan = PruningPlan.given(read_outline(checkpoint, checkpoint).identity, REMOVE)
    weights = load_file(checkpoint / "model.safetensors")
    weights[name].view(-1)[7] += 0.01
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(LyapunovPruneError, match="this plan is of"):
        prune_on_disk(read_outline(checkpoint, checkpoint), plan, tmp_path / "disk")


def test_a_plan_for_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", seed=1, vocab_size=len(VOCABULARY))
    with pytest.raises(LyapunovPruneError, match="this plan is of"):
        prune_on_disk(read_outline(checkpoint, checkpoint), PruningPlan.given(other, REMOVE), tmp_path / "disk")
    assert not (tmp_path / "disk").exists()


# What copying cannot do.


def test_no_file_lacks_a_part_of_a_layer(checkpoint: Path, tmp_path: Path) -> None:
    outline = read_outline(checkpoint, checkpoint)
    plan = PruningPlan.given(outline.identity, PartsGone((1,), (3,)))
    with pytest.raises(LyapunovPruneError):
        prune_on_disk(outline, plan, tmp_path / "disk")


# The gate on files: every planted fault is seen, and nothing is left.


def spoiled(change: Callable[[dict[str, TensorPiece]], None]) -> Callable[..., None]:
    write = shards.write_tensors

    def wrongly(folder: Path, pieces: dict[str, TensorPiece], shard_bytes: int) -> None:
        change(pieces)
        write(folder, pieces, shard_bytes)

    return wrongly


def missing_tensor(pieces: dict[str, TensorPiece]) -> None:
    del pieces["model.layers.2.mlp.up_proj.weight"]


def stray_tensor(pieces: dict[str, TensorPiece]) -> None:
    pieces["model.layers.4.mlp.up_proj.weight"] = pieces["model.layers.2.mlp.up_proj.weight"]


def wrong_shape(pieces: dict[str, TensorPiece]) -> None:
    pieces["model.layers.2.mlp.up_proj.weight"] = pieces["model.layers.2.mlp.down_proj.weight"]


def swapped_layers(pieces: dict[str, TensorPiece]) -> None:
    for name in [name for name in pieces if ".layers.1." in name]:
        other = name.replace(".layers.1.", ".layers.2.")
        pieces[name], pieces[other] = pieces[other], pieces[name]


def swapped_matrices(pieces: dict[str, TensorPiece]) -> None:
    first, other = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 2))
    pieces[first], pieces[other] = pieces[other], pieces[first]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (missing_tensor, "lacks 1 weights"),
        (stray_tensor, "model.layers.4.mlp.up_proj.weight"),
        (wrong_shape, "lacks 1 weights"),
        (swapped_layers, "layer 1 .*weights of layer 2"),
        (swapped_matrices, "layer 1 .*weights of layer 2"),
    ],
)
def test_the_gate_on_files_sees_a_planted_fault(
    fault: Callable[..., None], message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "write_tensors", spoiled(fault))
    with pytest.raises(CheckFailed, match=f"{message}"):
        on_disk(checkpoint, tmp_path / "disk")
    assert os.listdir(tmp_path) == [checkpoint.name]


def test_the_gate_on_files_sees_a_setting_that_is_lost(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make_tiny("gemma2", vocab_size=len(VOCABULARY)), tokenizer, tmp_path / "source")
    write = shards.write_tensors

    def turned(folder: Path, *args: Any) -> None:
        write(folder, *args)
        config = json.loads((folder / "config.json").read_text())
        config["layer_types"] = config["layer_types"][::-1]
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(shards, "write_tensors", turned)
    with pytest.raises(CheckFailed, match="layer 0 came back"):
        on_disk(tmp_path / "source", tmp_path / "disk", (0, 1))
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("at", ["write_tensors", "verify_files"])
def test_a_checkpoint_that_is_gone_on_the_way_is_no_failed_gate(
    at: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(
        make_tiny("llama", vocab_size=len(VOCABULARY)), tokenizer, tmp_path / "source", max_shard_size="20KB"
    )
    goes_on = getattr(shards, at)

    def gone(*args: Any, **options: Any) -> Any:
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        (source / index["model.layers.3.mlp.up_proj.weight"]).unlink()
        return goes_on(*args, **options)

    monkeypatch.setattr(shards, at, gone)
    with pytest.raises(LyapunovPruneError, match="no longer be read") as refused:
        on_disk(source, tmp_path / "disk", stream=True)
    assert refused.value.exit_code == 2
    assert os.listdir(tmp_path) == [source.name]


def test_states_that_are_not_finite_are_no_failed_gate(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model: Any = make_tiny("llama", vocab_size=len(VOCABULARY))
    for name in ("gate_proj", "up_proj"):  # finite weights, whose product is not
        getattr(model.model.layers[2].mlp, name).weight.data.fill_(1e30)
    saved(model, tokenizer, tmp_path / "source")
    with pytest.raises(NonFiniteError, match="output of layer 2 "):
        on_disk(tmp_path / "source", tmp_path / "disk", stream=True)
    assert on_disk(tmp_path / "source", tmp_path / "disk", (2,), stream=True).gate.passed


def test_the_gate_on_files_counts(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by = counting.held_by

    def wrongly(*args: Any) -> tuple[int, int]:
        parameters, size = held_by(*args)
        return parameters, size + 4

    monkeypatch.setattr(counting, "held_by", wrongly)
    with pytest.raises(CheckFailed, match="bytes saved"):
        on_disk(checkpoint, tmp_path / "disk")


def test_the_card_claims_no_more_than_was_checked(checkpoint: Path, tmp_path: Path) -> None:
    provenance = on_disk(checkpoint, tmp_path / "disk")
    assert provenance.gate.passed
    assert [check.name for check in provenance.gate.checks] == [
        "keys and settings",
        "layers in their places",
        "fell by what was removed",
    ]
    assert provenance.not_run == ("same as skipping", "cached decoding", "logits after reloading")
    assert Provenance.load(tmp_path / "disk" / PROVENANCE).to_json() == provenance.to_json()
    card = (tmp_path / "disk" / "README.md").read_text(encoding="utf-8")
    assert (card.count("| passed |"), card.count("| not run |")) == (3, 3)
    assert "no logits of this model have been computed" in card


# The command.


@pytest.fixture
def command(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    monkeypatch.chdir(checkpoint.parent)

    def run(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lyapunov-prune", "prune", "tiny", "-o", "out", *options])
        with pytest.raises(SystemExit) as end:
            main()
        return (end.value.code, *capsys.readouterr())  # type: ignore[return-value]

    return run


def test_prune_on_disk_says_what_was_checked(command: Callable[..., Any]) -> None:
    code, out, err = command("--device", "disk", "--layers", "1,4")
    assert (code, err) == (0, "")
    assert "Pruned on disk (--device disk); the removal checks on files, and on logits of streamed models:" in out
    assert "Not run: cached decoding." in out
    assert len(Provenance.load(Path("out") / PROVENANCE).kept_to_original) == 4


def test_what_does_not_fit_is_pruned_on_disk(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    assert "and 0.0 GB are free" in too_large("tiny")
    code, out, err = command("--layers", "1,4")
    assert (code, err) == (0, "")
    assert "Pruned on disk (two copies need 0.0 GB and 0.0 GB are free)" in out
    assert "Removal check: passed" not in out
    assert "Not run: same as skipping, cached decoding, logits after reloading." in out


def test_what_does_not_fit_on_the_gpu_is_pruned_on_disk(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU of this machine is one that the test made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "_usable", lambda name: True)
    free = {"cuda": 1000, "cpu": 10**9}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (free[name], 10**9))
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free["cpu"]}))
    assert "--remove needs the model in memory (one copy needs" in command("--remove", "1")[2]
    code, out, err = command("--layers", "1,4")
    assert (code, err) == (0, "")
    assert "Pruned on disk (one copy needs 0.0 GB and 0.0 GB are free on cuda)" in out
    size = os.path.getsize("tiny/model.safetensors")
    free |= {"cuda": size, "cpu": size}  # one on each: the original, and what is reloaded
    assert too_large("tiny", "cuda") is None
    assert too_large("tiny") == f"two copies need {2 * size / 1e9:.1f} GB and {size / 1e9:.1f} GB are free"
    free["cpu"] -= 1
    assert "are free on cpu" in too_large("tiny", "cuda")


def test_what_fits_is_pruned_in_memory(command: Callable[..., Any]) -> None:
    assert too_large("tiny") is None
    code, out, _ = command("--layers", "1,4", "--tokens", "128", "--context", "64")
    assert code == 0
    assert "Pruned on disk" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--remove", "2"],
            "--remove .*--device disk",
        ),
        (["--layers", "1", "--dtype", "float32"], "--dtype .*--device disk"),
        (["--layers", "1", "--what", "attention"], "--what .*--device disk"),
        (["--layers", "9"], "no layer 9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_on_disk_is_one_line(options: list[str], message: str, command: Callable[..., Any]) -> None:
    code, out, err = command("--device", "disk", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)
    assert not Path("out").exists()


# A disk that fills up, and a process that is killed.


def in_a_child(work: Callable[[], object]) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def test_a_disk_without_room_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept has to fit, not what goes."""
    on_disk(checkpoint, tmp_path / "first")
    kept = sum(t.nbytes for t in load_file(tmp_path / "first" / "model.safetensors").values())
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(kept - 1))
    with pytest.raises(LyapunovPruneError, match=f"{kept:,} bytes"):
        on_disk(checkpoint, tmp_path / "second")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(kept))
    on_disk(checkpoint, tmp_path / "second")


@pytest.mark.parametrize("size", [400, 6_000, 60_000], ids=["config", "tokenizer", "weights"])
def test_a_real_limit_on_file_size_leaves_nothing(size: int, checkpoint: Path, tmp_path: Path) -> None:
    def work() -> None:
        limit_file_size(size)
        with pytest.raises(LyapunovPruneError, match="disk failed"):
            on_disk(checkpoint, tmp_path / "disk")

    child = in_a_child(work)
    child.join()
    assert child.exitcode == 0
    assert os.listdir(tmp_path) == [checkpoint.name]


def test_killed_at_any_moment_it_leaves_a_whole_checkpoint_or_none(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(checkpoint, tmp_path / "whole", shard_bytes=10_000)
    parts = tensor_files.parts_of

    def slowly(*args: Any) -> Any:
        time.sleep(0.01)  # else a small checkpoint is written between two moments
        return parts(*args)

    monkeypatch.setattr(tensor_files, "parts_of", slowly)  # the children are forks
    wanted = tensors(tmp_path / "whole")
    target = tmp_path / "disk"

    def kill(child: Any) -> None:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert not target.exists() or tensors(target) == wanted
        assert not target.exists() or Provenance.load(target / PROVENANCE).gate.passed
        shutil.rmtree(target, ignore_errors=True)

    child = in_a_child(lambda: on_disk(checkpoint, target, shard_bytes=10_000))
    start = time.perf_counter()
    while not target.exists():  # the last of the moments: as soon as it appears
        time.sleep(1e-4)
    duration = time.perf_counter() - start
    kill(child)
    # What is left is of the last alone, as each run removes what a killed one has left: so that one ends in the middle.
    for part in (*np.linspace(0.1, 1, 8), 0.5):
        child = in_a_child(lambda: on_disk(checkpoint, target, shard_bytes=10_000))
        time.sleep(part * duration)
        kill(child)
    left = set(os.listdir(tmp_path)) - {checkpoint.name, "whole"}
    assert left
    assert all(name.startswith(".disk.partial-") for name in left)


# A large one.

LARGE = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5}


def write_large(folder: Path) -> dict[str, int]:
    """A sharded bfloat16 checkpoint of 900 MB: the shapes of a Llama, and one block of random bytes again and again."""
    config = AutoConfig.for_model("llama", **LARGE, num_attention_heads=16, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    block = np.random.default_rng(0).integers(0, 2**16, 2**20 + 7, dtype=np.uint16)
    sizes: dict[str, int] = {}
    where: dict[str, str] = {}
    for number, (name, tensor) in enumerate(state.items()):
        values = torch.from_numpy(np.resize(np.roll(block, number), tensor.numel()).view(np.int16)).view(torch.bfloat16)
        where[name] = f"model-{number + 1:05}-of-{len(state):05}.safetensors"
        save_file({name: values.view(tensor.shape)}, folder / where[name], {"format": "pt"})
        sizes[name] = values.nbytes
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sizes


def peak_of(work: Callable[[], object]) -> int:
    """Bytes of resident memory, mapped files included, that `work` needs at its peak in a process of its own."""
    queue = multiprocessing.get_context("fork").Queue()

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(text for text in lines if text.startswith(field)).split()[1]) * 1024

    def child() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        work()
        queue.put(status("VmHWM") - before)

    process = in_a_child(child)
    process.join()
    assert process.exitcode == 0
    return queue.get(timeout=5)


@pytest.mark.slow
def test_a_large_checkpoint_needs_no_more_memory_than_a_tensor(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "disk"
    try:
        sizes = write_large(source)
        tokenizer.save_pretrained(source)
        assert sum(sizes.values()) > 8e8
        peak = peak_of(lambda: on_disk(source, target, (1, 3), shard_bytes=3 * 10**8))
        assert peak < max(sizes.values()) + 200e6, f"{peak / 1e6:.0f} MB"
        before, after = read_tensors(source), read_tensors(target)
        assert len({tensor.file for tensor in after.values()}) == 3
        for name, tensor in after.items():
            old = name.replace(".layers.1.", ".layers.2.") if ".layers.1." in name else name
            old = old.replace(".layers.2.", ".layers.4.") if ".layers.2." in name else old
            assert np.array_equal(raw(tensor), raw(before[old])), name
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)


def raw(tensor: Any) -> np.ndarray:
    return np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.size,))


def test_without_a_word_a_file_holds_five_gigabytes() -> None:
    assert inspect.signature(shards.prune_on_disk).parameters["shard_bytes"].default == 5_000_000_000
