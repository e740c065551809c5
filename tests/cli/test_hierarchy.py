"""`hierarchy`: compressed and pruned models, verdicts and prompts."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TEXT, VOCABULARY, make_tiny, operated, saved
from transformers import PreTrainedTokenizerFast

from lyapunov_prune.forward import decoding
from lyapunov_prune.predictions import generation as generation_module
from lyapunov_prune.predictions.choice_comparison import ChoiceComparison
from lyapunov_prune.predictions.hierarchy_probe import HierarchyProbe
from lyapunov_prune.predictions.verdict import Verdict


def test_hierarchy_follows_a_compressed_and_a_pruned_model(run: Any, pruned: Any) -> None:
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "3"]
    assert run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded").code == 0
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n' * 2)
    assert "give COMPRESSED as well" in run("hierarchy", "tiny", "--choices", "items.jsonl").err
    asked = ["--choices", "items.jsonl"]
    assert run("hierarchy", "tiny", "rounded", *asked, *few).code == 0
    written = {p.name for p in Path("runs/tiny").iterdir()}
    assert {
        "hierarchy.json",
        "generation.json",
        "diverged-history.json",
        "choices.json",
        "verdict.json",
        "report.html",
    } <= written
    assert len(ChoiceComparison.load("runs/tiny/choices.json").gold) == 2
    rounded = HierarchyProbe.load("runs/tiny/hierarchy.json")
    assert run("hierarchy", "tiny", *few).code == 0
    dropped = HierarchyProbe.load("runs/tiny/hierarchy.json")
    assert rounded.kl.mean() < dropped.kl.mean()
    pruned("1")
    done = run("hierarchy", "tiny", "out", *few)
    assert done.code == 0
    assert "left out by themselves" in done.out
    assert "out has 5 of 6 layers" in done.out


def test_hierarchy_refuses_what_was_not_made_from_the_dense_model(
    run: Any, pruned: Any, run_bad: Any, checkpoint: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "1"]
    for name, changes, told in (
        ("gpt2", {}, "family of gpt2 and the dense one of llama"),
        ("llama", {"hidden_size": 64}, "width of 64 and the dense one of 32"),
    ):
        model = make_tiny(name, vocab_size=len(VOCABULARY), **changes)
        saved(operated(model, (1,)), tokenizer, checkpoint.parent / "other")
        assert told in run_bad("hierarchy", "tiny", "other", *few)
        shutil.rmtree("other")
    saved(make_tiny("llama", seed=1, vocab_size=len(VOCABULARY)), tokenizer, checkpoint.parent / "stranger")
    pruned("1")
    assert run("prune", "out", "--layers", "1", "-o", "twice", *TEXT).code == 0
    told = run_bad("hierarchy", "stranger", "out", *few)
    assert "'tiny' (out/provenance.json)" in told
    assert run("hierarchy", "tiny", "twice", *few).code == 0


def test_hierarchy_decodes_each_text_once_and_by_the_batch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what generation walks through both models."""
    assert run("compress", "tiny", "--method", "rtn", "--bits", "8", "-o", "rounded").code == 0
    walk = decoding.walk
    walks: list[tuple[str, int]] = []

    def counted(reading: Any, prompts: torch.Tensor, *args: Any, **given: Any) -> Any:
        walks.append((reading.model.config._name_or_path, len(prompts)))
        return walk(reading, prompts, *args, **given)

    for module in (decoding, generation_module):
        monkeypatch.setattr(module, "walk", counted)
    few = ["--tokens", "64", "--context", "16", "--new-tokens", "3"]
    assert run("hierarchy", "tiny", "rounded", *few).code == 0
    assert Counter(walks) == {("tiny", 1): 8, ("rounded", 1): 8}  # four prompts, twice


@pytest.mark.usefixtures("drawn")
def test_hierarchy_gives_a_verdict_by_kind_of_task(run: Any, pruned: Any) -> None:
    Path("items.jsonl").write_text('{"query": "one two", "choices": ["three", "four five"], "gold": 1}\n' * 2)
    few = ["--tokens", "32", "--context", "16", "--new-tokens", "3"]
    asked = ["--choices", "items.jsonl", *few]
    assert "--choices compares two models" in run("hierarchy", "tiny", "--choices", "items.jsonl").err
    pruned("1")
    done = run("hierarchy", "tiny", "out", *asked)
    assert done.code == 0
    found = Verdict.load("runs/tiny/verdict.json")
    assert [k.task for k in found.kinds] == ["choice", "generation"]
    assert "generation: " in done.out
    page = Path("runs/tiny/report.html").read_text()
    assert page.index("<h2>Verdict by kind of task</h2>") < page.index("<h2>Hidden state, logits, probabilities</h2>")
