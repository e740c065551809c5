"""Every decoder on disk: the files that removal in memory writes, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from families.verdicts import load_table
from families.zoo import ALIKE, LAYERS, SMALL, ZOO, each_by_itself, make_zoo
from helpers import on_disk, operated, tensors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lyapunov_prune.checkpoints import tensor_files
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.tensor_files import read_tensors
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.models import loading
from lyapunov_prune.models.structure import identify, require_causal
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers

REMOVE = (2, 5)
REMOVED = "two apart (2, 5)"


# Tensors are copied by name; that headers tell what memory does, test_streamed.py holds for every decoder.
@pytest.mark.slow
@pytest.mark.parametrize("name", each_by_itself(name for name in ZOO if name not in ALIKE))
def test_every_kind_of_layer_is_pruned_as_in_memory_or_refused(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source, memory, disk = saved(name), tmp_path / "memory", tmp_path / "disk"
    try:
        model = AutoModelForCausalLM.from_pretrained(source)
        identity = identify(model)
    except Exception:
        pytest.skip("this decoder cannot be loaded here")
    try:
        outline = read_outline(source, model.config._name_or_path)
    except LyapunovPruneError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert reason.endswith("take it in memory")
        return
    assert outline.identity == identity
    try:
        prune_on_disk(outline, PruningPlan.given(outline.identity, REMOVE), disk, shard_bytes=20_000)
    except LyapunovPruneError:
        assert not disk.exists()
        return
    assert load_table()[name]["removals"][REMOVED] == "yes"  # test_families.py holds the gate against this verdict
    operated(model, REMOVE).save_pretrained(memory)
    assert tensors(disk) == tensors(memory)
    assert (disk / "config.json").read_text() == (memory / "config.json").read_text()


@pytest.mark.parametrize("name", ["bert", "gpt_neox", "gpt_neox_japanese"])
def test_a_config_that_says_encoder_is_believed_where_it_is_true(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL, "is_decoder", False)
    model = make_zoo(name)
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    try:
        require_causal(model)
    except LyapunovPruneError:
        with pytest.raises(LyapunovPruneError, match="an encoder"):
            read_outline(tmp_path / "source", name)
    else:
        assert read_outline(tmp_path / "source", name).decoder.structure.num_layers == LAYERS


def test_a_family_that_no_test_has_judged_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_zoo("llama").save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    monkeypatch.setattr(loading, "JUDGED", frozenset({"mistral"}))
    with pytest.raises(LyapunovPruneError, match="llama has not passed"):
        on_disk(tmp_path / "source", tmp_path / "disk", (2,))


def test_counts_that_move_on_are_copied_as_in_memory(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Qwen 4's second n-gram table stays when the first leaves, with the hash of the checkpoint."""
    source, memory, disk = tmp_path / "source", tmp_path / "memory", tmp_path / "disk"
    model = make_zoo("qwen4_exp_text")
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    on_disk(source, disk, (0,))
    remove_layers(AutoModelForCausalLM.from_pretrained(source), (0,)).save_pretrained(memory)
    assert tensors(disk) == tensors(memory)
    assert (disk / "config.json").read_text() == (memory / "config.json").read_text()


def test_tables_are_cut_block_by_block(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per-layer embeddings lie outside the layers; a buffer smaller than a row makes every row a write."""
    source, memory, disk = tmp_path / "source", tmp_path / "memory", tmp_path / "disk"
    model = make_zoo("gemma4_text")
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    monkeypatch.setattr(tensor_files, "BUFFER", 1000)
    on_disk(source, disk, (0, 3))
    remove_layers(model, (0, 3)).save_pretrained(memory)
    assert tensors(disk) == tensors(memory)
    name = next(name for name in tensors(disk) if "embed_tokens_per_layer" in name)
    assert read_tensors(disk)[name].shape[1] == read_tensors(source)[name].shape[1] // LAYERS * (LAYERS - 2)


@pytest.mark.parametrize(
    ("name", "remove", "message"),
    [
        ("gpt2-inverse-layer", (2,), "weights change"),
        ("diffllama", (2,), "diffllama"),
        ("zamba", (2,), "is shared"),
        ("zamba2", (2,), "is numbered in another way"),
        ("zaya", (0,), "router_states_scale is numbered"),
        ("rwkv", (2,), "RwkvForCausalLM cannot be judged"),
    ],
)
def test_what_copying_or_headers_cannot_do_is_refused(
    name: str, remove: tuple[int, ...], message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_zoo(name).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    with pytest.raises(LyapunovPruneError, match=message):
        on_disk(tmp_path / "source", tmp_path / "disk", remove)
    assert os.listdir(tmp_path) == ["source"]
