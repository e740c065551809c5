"""Experiments that run the program's commands: each once, and one command beside the same steps by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from helpers import make_tiny

import lyapunov_prune as lp
from experiments import by_commands
from experiments.by_commands import against, run_once
from experiments.common import Model
from lyapunov_prune.shrinking.report import Taken

one_command: Any = importlib.import_module("experiments.6_recovery.shrink.run")
by_hand = one_command.BY_HAND
RNG = np.random.default_rng(0)


def test_a_finished_command_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Done:
        returncode = 1

    def run(command: list[str], check: bool) -> Done:
        commands.append(command[3:])
        return Done()

    monkeypatch.setattr(by_commands.subprocess, "run", run)
    first = run_once(tmp_path / "out", ["prune", str(tmp_path)])
    assert run_once(tmp_path / "out", ["prune", str(tmp_path)]) == first
    assert commands == [["prune", str(tmp_path), "-o", str(tmp_path / "out")]]
    assert (first.code, first.options) == (1, f"prune {tmp_path.name}")
    Done.returncode = 2
    with pytest.raises(typer.Exit):
        run_once(tmp_path / "other", ["prune"])
    assert not (tmp_path / "other.json").exists()


def test_better_and_worse_are_told_by_the_paired_interval() -> None:
    before = RNG.normal(3, 1, 16)
    noise = RNG.normal(0, 0.01, 16)
    assert against(before, before - 0.1 + noise).startswith("better: 0.9")
    assert against(before, before + 0.1 + noise).startswith("worse: 1.1")
    assert against(before, before + noise - noise.mean()).startswith("not told apart: 1")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model scored by both experiments on the same windows; the folder of the one command."""
    here, there = tmp_path / "one", tmp_path / "hand"
    monkeypatch.setattr(one_command, "HERE", here)
    monkeypatch.setattr(one_command, "THERE", there)
    ids = torch.arange(16 * 8).reshape(16, 8) % 64
    on = lp.TokenBatch(ids, "unseen", "all", None).measured_on(make_tiny("llama"))
    dense = RNG.normal(3, 1, 16)
    states = tuple(
        by_hand.State(name, name, (1, 2), dense + over, 60.0, True, "")
        for name, over in (("cut", 0.5), ("mended", 0.4), ("healed", 0.3))
    )
    by_hand.NeverWorse(dense, states, "a.txt", on).save(there / "tiny-a.json")
    one = one_command.OneCommand(
        options="shrink tiny --remove 25%",
        text="a.txt",
        removed=(1, 2),
        parameters=(4_000_000, 3_000_000),
        size=(16_000_000, 12_000_000),
        steps=(Taken("mending", False, "nothing gained", 6.0), Taken("healing", True, "-10%", 30.0)),
        seconds=90.0,
        dense=dense,
        windows=dense + 0.2 + RNG.normal(0, 0.01, 16),
        measured_on=on,
    )
    one.save(here / "tiny-a.json")
    return here


def test_one_command_stands_beside_the_last_state_by_hand(results: Path) -> None:
    tables = one_command.written()
    row = tables["table"].splitlines()[2]
    assert "| 4.0 M → 3.0 M | 1, 2 |" in row
    assert "better: 0.9" in row
    assert row.endswith("| 1.5 | 2.0 |")  # minutes: of `prune --mend` and `heal`
    assert "| mending | no | nothing gained | 0.1 |" in tables["steps"]
    drawn = one_command.figure(*one_command._results())
    assert all(name in drawn for name in ("cut", "mended", "healed", "one command"))


def test_other_windows_are_not_compared(results: Path) -> None:
    path = results / "tiny-a.json"
    text = path.read_text()
    hash_ = one_command.OneCommand.load(path).measured_on.text_hash
    path.write_text(text.replace(hash_, "0" * 64))
    with pytest.raises(ValueError, match="other windows"):
        one_command.written()


def test_a_result_that_is_there_is_drawn_and_not_measured(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_command.main(unseen="nowhere.txt", model=Model("tiny"), text=["a.txt"])
    assert "already measured" in capsys.readouterr().out
    assert (results / "recovery.svg").is_file()
