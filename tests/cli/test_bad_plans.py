"""A plan of another model is refused; a failed gate writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import COMMANDS, QUICK, TEXT, VOCABULARY, Done, make_tiny, wrong_layer_idx

from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.pruning import surgery
from lyapunov_prune.pruning.surgery import Operation


@pytest.mark.parametrize("cut", [10, -5])
def test_a_profile_cut_short(cut: int, run: Callable[..., Done], run_bad: Callable[..., str]) -> None:
    run("profile", "tiny", "-o", "run", *QUICK)
    path = Path("run/profile.json")
    path.write_text(path.read_text(encoding="utf-8")[:cut], encoding="utf-8")
    assert "this version" in run_bad("rank", str(path))


@pytest.mark.parametrize("other", ["gpt2", "llama"])
def test_a_plan_made_for_another_model(
    other: str, run: Callable[..., Done], run_bad: Callable[..., str], checkpoint: Path
) -> None:
    run("rank", "tiny", "--remove", "1", "-o", "run", *TEXT)
    make_tiny(other, seed=1, vocab_size=len(VOCABULARY)).save_pretrained(checkpoint)
    line = run_bad("prune", "tiny", "--plan", "run/plan.json", "-o", "out", *TEXT)
    assert "of tiny (llama, 6 layers), not of tiny" in line


def test_a_plan_for_another_model_is_refused_before_its_text_is_read(
    run: Callable[..., Done], run_bad: Callable[..., str], checkpoint: Path
) -> None:
    run("rank", "tiny", "--remove", "1", "-o", "run", *TEXT)
    make_tiny("gpt2", vocab_size=len(VOCABULARY), n_positions=32).save_pretrained(checkpoint)
    line = run_bad("prune", "tiny", "--plan", "run/plan.json", "-o", "out", *TEXT)
    assert "of tiny (llama, 6 layers), not of tiny" in line


# A failed check, usage, interruption.


def test_a_failed_gate_is_exit_code_1_and_nothing_written(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = surgery.cut

    def wrongly(decoder: Decoder, operation: Operation, **how: Any) -> Decoder:
        pruned = right(decoder, operation)
        wrong_layer_idx(pruned.model)
        return pruned

    monkeypatch.setattr(surgery, "cut", wrongly)
    done = run(*COMMANDS["prune"], "--criterion", "bi")
    assert done.code == 1
    assert done.err.startswith("error: nothing written: the pruned model fails the removal check, cached decoding: ")
    assert (done.err.count("\n"), done.out, done.changed) == (1, "", set())
