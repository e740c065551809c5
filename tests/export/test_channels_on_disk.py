"""Channels removed from files: chosen on the streamed model, bit for bit what removal in memory writes, and gated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.zoo import make_zoo
from helpers import make_mixture, make_tiny, require_same_files

from lyapunov_prune import load, load_streamed
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.tensor_files import Joined
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import copied, disk_gate
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.export.disk_gate import PLACED
from lyapunov_prune.pruning.gate import SKIPPED
from lyapunov_prune.pruning.width import choose_channels

# Plain, fused and transposed matrices; bare in the layer; experts with a tensor each, one tensor for all (in turn, one
# below the other), and entries of no expert.
MODELS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("llama", "phi3", "gpt2", "opt"), partial(make_tiny, num_hidden_layers=3)),
    **dict.fromkeys(("qwen3_moe", "gpt_oss"), make_mixture),
    **dict.fromkeys(("dbrx", "longcat_flash"), make_zoo),
}
IDS = torch.randint(3, 90, (3, 24), generator=torch.Generator().manual_seed(1))


def save(name: str, folder: Path, tokenizer: Any) -> None:
    MODELS[name](name).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", MODELS)
def test_the_files_are_those_that_removal_in_memory_writes(name: str, tmp_path: Path, tokenizer: Any) -> None:
    source = tmp_path / "source"
    save(name, source, tokenizer)
    loaded = load(source)
    plan = choose_channels(load_streamed(source), IDS, 0.5)
    assert plan.gone == choose_channels(loaded, IDS, 0.5).gone
    if name == "llama":
        plan = replace(plan, gone=plan.gone.beside((1,)))
    require_same_files(loaded, source, plan, tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_two_swapped_channels_in_the_files_fail_the_gate(
    name: str, tensor: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(name, tmp_path / "source", tokenizer)
    outline, write = read_outline(tmp_path / "source", tmp_path / "source"), copied.write_tensors
    plan = choose_channels(load(tmp_path / "source"), IDS, 0.5)

    def swapped(piece: Any) -> Any:
        if isinstance(piece, Joined):
            return replace(piece, pieces=(swapped(piece.pieces[0]), *piece.pieces[1:]))
        return replace(piece, kept=(piece.kept[1], piece.kept[0], *piece.kept[2:]))

    def others(folder: Path, pieces: dict[str, Any], shard_bytes: int) -> None:
        write(folder, {**pieces, tensor: swapped(pieces[tensor])}, shard_bytes)

    monkeypatch.setattr(copied, "write_tensors", others)
    with pytest.raises(CheckFailed, match=PLACED):
        prune_on_disk(outline, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_logits_are_compared_with_the_channels_masked(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llama", tmp_path / "source", tokenizer)
    outline = read_outline(tmp_path / "source", tmp_path / "source")
    plan = choose_channels(load(tmp_path / "source"), IDS, 0.5)
    narrower = disk_gate._narrower
    gone: Any = plan.gone
    other = replace(plan, gone=replace(gone, channels=(gone.channels[0], *gone.channels[:1], *gone.channels[2:])))
    monkeypatch.setattr(disk_gate, "_narrower", lambda decoder, plan: narrower(decoder, other))
    with pytest.raises(CheckFailed, match=SKIPPED):
        prune_on_disk(outline, plan, tmp_path / "out", stream=True)


def test_channels_of_another_number_are_refused_before_anything_is_written(tmp_path: Path, tokenizer: Any) -> None:
    save("llama", tmp_path / "source", tokenizer)
    with pytest.raises(LyapunovPruneError, match="multiple of 8"):
        choose_channels(load_streamed(tmp_path / "source"), IDS, 1)
