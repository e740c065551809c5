"""A changed model is written as a plain checkpoint, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune import compress
from lyapunov_prune.allocation.table import SCHEDULES
from lyapunov_prune.checkpoints import saving
from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.checkpoints.saving import write_model
from lyapunov_prune.compression import CompressionReport
from lyapunov_prune.compression.report import REPORT
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.results.history import read_history


def test_the_checkpoint_is_plain_and_whole(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama")
    done = compress(model, ids, method="wanda", sparsity=0.5)
    write_model(done.model, tokenizer, tmp_path / "small", {REPORT: done.report}, "small", done.report.about())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, done.model(ids).logits)
    assert CompressionReport.load(tmp_path / "small" / "compression.json").zeros == pytest.approx(0.5, abs=0.01)
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "neither memory nor time" in card
    for entry in (METHODS[done.report.method], SCHEDULES["uniform"]):
        assert as_text(f"{entry.help} ({entry.reference})") in card

    def wrong(decoder: Decoder, folder: Path, inputs: list[torch.Tensor]) -> Any:
        with torch.no_grad():  # planted: what is on disk is another model
            decoder.layers[2].mlp.up_proj.weight.mul_(1.01)
        return reload_check(decoder, folder, inputs)

    reload_check = saving.reload_check
    monkeypatch.setattr(saving, "reload_check", wrong)
    with pytest.raises(CheckFailed, match="nothing written"):
        write_model(done.model, tokenizer, tmp_path / "wrong", {}, "wrong", "")
    assert not (tmp_path / "wrong").exists()


def test_a_strange_name_is_text_in_the_card(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = make_tiny("llama")
    model.config._name_or_path = "m\n---\n# x\x1b[2J [a](http://b) `c`"
    done = compress(model, ids, method="wanda", sparsity=0.5)
    title = "t\n---\n# <b>"
    write_model(done.model, tokenizer, tmp_path / "small", {REPORT: done.report}, title, done.report.about())
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert all(c.isprintable() for c in card.replace("\n", ""))
    assert [line for line in card.splitlines() if line.startswith(("#", "---"))] == [
        "---",
        "---",
        r"# t\\n---\\n# \<b\>",
        "## Load",
        "## Run",
    ]
    assert r"\[a\](http://b) \`c\`" in card


def test_a_model_that_was_changed_in_memory_is_saved_with_its_history(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = make_tiny("llama")
    pruned = lp.remove_layers(model, lp.PruningPlan.given(model, [1, 2]))
    small = lp.compress(pruned, ids, method="wanda", sparsity=0.5).model
    lp.save(small, tokenizer, tmp_path / "small")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, small(ids).logits)
    assert [step.kind for step in read_history(tmp_path / "small").steps] == ["prune", "compress"]
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "Made by: prune, compress." in card
    assert "tokens of token ids" in card
    with pytest.raises(LyapunovPruneError, match="not empty"):
        lp.save(small, tokenizer, tmp_path / "small")


def test_a_model_inside_adapters_is_not_saved(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make_tiny("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(LyapunovPruneError, match="merge_and_unload"):
        lp.save(adapted, tokenizer, tmp_path / "small")
    assert not (tmp_path / "small").exists()
