"""`compress --format compact`, and what is done with what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.compression.amount import BudgetedCompression
from lyapunov_prune.compression.report import REPORT
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.export import factored

TEXT = ("--tokens", "64", "--context", "32")
FACTOR = ("compress", "tiny", "--method", "svd", "--format", "compact", "-o", "small")


@pytest.fixture(autouse=True)
def here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that takes seconds to start: tests/export/test_factored.py has it."""
    passed = GateCheck("reloads without this package", True, 0.0, 1.0, "not run: it takes seconds")
    monkeypatch.setattr(factored, "elsewhere_check", lambda *_: passed)


@pytest.mark.usefixtures("healing_kept")
def test_two_factors_are_smaller_and_like_any_other_model(run: Callable[..., Any]) -> None:
    done = run(*FACTOR, "--sparsity", "0.4")
    assert done.code == 0, done.err
    assert "Stored as two factors of 42 matrices (compact): " in done.out
    assert Path("small/model.safetensors").stat().st_size < Path("tiny/model.safetensors").stat().st_size
    assert run("compress", "tiny", "--method", "svd", "--sparsity", "0.4", "-o", "dense").code == 0
    for command in (
        ("eval", "small", "--against", "dense", "--speed", *TEXT),
        ("profile", "small", "-o", "run", *TEXT),
        ("rank", "small", "--criterion", "bi", "-o", "run", *TEXT),
        ("rank", "small", "--what", "attention", "--criterion", "kl", "-o", "run", *TEXT),
        ("hierarchy", "tiny", "small", "--new-tokens", "2", "-o", "run", *TEXT),
        ("prune", "small", "--layers", "1", "-o", "fewer", *TEXT),
        ("prune", "small", "--layers", "1", "--what", "attention", "-o", "zeroed", *TEXT),
        ("compress", "small", "--method", "wanda", "--sparsity", "0.5", "-o", "sparse", *TEXT),
        ("heal", "small", "--teacher", "tiny", "--steps", "1", "-o", "healed", *TEXT),
    ):
        done = run(*command)
        assert done.code == 0, (command, done.err)
    dense, small = Evaluation.load(Path("runs/small/eval.json")).perplexities
    assert small.value == pytest.approx(dense.value, rel=1e-3)


def test_a_layer_at_a_time_the_same_is_written(run: Callable[..., Any]) -> None:
    for more in (("-o", "small"), ("-o", "apart", "--device", "disk")):
        assert run(*FACTOR, "--sparsity", "0.4", *more).code == 0
    whole, apart = (json.loads(Path(folder, REPORT).read_text()) for folder in ("small", "apart"))
    assert whole["packed"] == apart["packed"]
    done = run("eval", "apart", "--device", "disk", "--against", "small", *TEXT)
    assert done.code == 0, done.err
    small, apart = Evaluation.load(Path("runs/apart/eval.json")).perplexities
    assert small.value == pytest.approx(apart.value, rel=1e-6)


def test_a_budget_writes_what_was_tried(run: Callable[..., Any]) -> None:
    done = run(*FACTOR, "--max-kl", "2", *TEXT)
    assert done.code == 0, done.err
    assert BudgetedCompression.load(Path("small/amounts.json")).chosen >= 0
    assert json.loads(Path("small/compression.json").read_text())["packed"]["factored"] > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "svd takes sparsity or rank"),
        (
            ("--method", "wanda", "--sparsity", "0.5"),
            "result of wanda",
        ),
        (("--method", "rtn", "--bits", "4", "--device", "disk"), "result of rtn"),
    ],
)
def test_what_has_no_factors_is_one_line(more: tuple[str, ...], told: str, run_bad: Callable[..., str]) -> None:
    assert told in run_bad(*FACTOR, *more)
