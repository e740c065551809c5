"""Experts removed from files: bit for bit what removal in memory writes, and a swap of two of them fails the gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import MIXTURES, make_mixture, require_same_files

from lyapunov_prune import LyapunovPruneError, load
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.errors import CheckFailed
from lyapunov_prune.export import copied
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.export.disk_gate import PLACED
from lyapunov_prune.models.mixtures import find_mixtures
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ExpertsGone


def plan_of(model: Any, outline: Any, remove: tuple[int, ...]) -> PruningPlan:
    layers = [layer for layer in find_mixtures(find_structure(model)).layers if layer not in remove]
    return PruningPlan.given(outline.identity, ExpertsGone(tuple(remove), {layer: (0, 4 + layer) for layer in layers}))


@pytest.mark.parametrize("name", MIXTURES)
def test_the_files_are_those_that_removal_in_memory_writes(name: str, tmp_path: Path, tokenizer: Any) -> None:
    source = tmp_path / "source"
    make_mixture(name).save_pretrained(source)
    tokenizer.save_pretrained(source)
    outline, loaded = read_outline(source, source), load(source)
    plan = plan_of(loaded.model, outline, (0,) if name in ("qwen3_moe", "ernie4_5_moe") else ())
    require_same_files(loaded, source, plan, tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # a tensor for each expert, and one for all
def test_other_experts_in_the_files_fail_the_gate(
    name: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_mixture(name)
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    outline = read_outline(tmp_path / "source", tmp_path / "source")
    plan, write = plan_of(model, outline, ()), copied.write_tensors

    def others(folder: Path, pieces: dict[str, Any], shard_bytes: int) -> None:
        if name == "qwen3_moe":
            first, other = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (1, 2))
            pieces |= {first: pieces[other], other: pieces[first]}
        else:
            stacked = "model.layers.1.mlp.experts.down_proj"
            pieces[stacked] = replace(pieces[stacked], kept=pieces[stacked].kept[::-1])
        write(folder, pieces, shard_bytes)

    monkeypatch.setattr(copied, "write_tensors", others)
    with pytest.raises(CheckFailed, match=PLACED):
        prune_on_disk(outline, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_experts_than_can_go_are_refused_before_anything_is_read(tmp_path: Path, tokenizer: Any) -> None:
    make_mixture("mixtral").save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    outline = read_outline(tmp_path / "source", tmp_path / "source")
    plan = PruningPlan.given(outline.identity, ExpertsGone((), dict.fromkeys(range(3), tuple(range(7)))))
    with pytest.raises(LyapunovPruneError, match="give 1 to 6"):
        prune_on_disk(outline, plan, tmp_path / "out")
