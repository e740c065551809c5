"""Experiments that run the program's commands: each once, and one command beside the same steps by hand."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from helpers import make_tiny

import lyapunov_prune as lp
from experiments import by_commands, common
from experiments.by_commands import against, run_once
from experiments.common import Model
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.shrinking.report import Taken

one_command: Any = importlib.import_module("experiments.6_recovery.shrink.run")
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
    assert against(before, before + noise - noise.mean()).startswith("no significant difference: 1")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What one command made of a model, scored on two texts; the folder of it."""
    monkeypatch.setattr(one_command, "HERE", tmp_path)
    ids = torch.arange(16 * 8).reshape(16, 8) % 64
    model = make_tiny("llama")
    learnt, *on = (lp.TokenBatch(ids, name, "all", None).measured_on(model) for name in ("a.txt", "b.txt", "c.txt"))
    dense = RNG.normal(3, 1, 16)
    one = one_command.OneCommand(
        options="shrink tiny --remove 25%",
        commit="0123456789ab",
        removed=(1, 2),
        parameters=(4_000_000, 3_000_000),
        size=(16_000_000, 12_000_000),
        steps=(Taken("mending", False, "nothing gained", 6.0), Taken("healing", True, "-10%", 30.0)),
        seconds=90.0,
        learnt_on=learnt,
        dense=(dense, dense),
        windows=(dense + np.log(1.5), dense + np.log(2)),
        measured_on=tuple(on),
    )
    one.save(tmp_path / "tiny.json")
    return tmp_path


def test_the_headline_names_commit_texts_and_ratios(results: Path) -> None:
    tables = one_command.written()
    assert tables["table"].splitlines()[2].endswith("| a | 1, 2 | 1.5 (1.5–1.5) | 2 (2–2) | 1.5 |")
    assert "| 4 M → 3 M | 1.5 (1.5–1.5) | 2 (2–2) | 2 |" in tables["short"]
    assert "commit 0123456789ab, which learnt from 128 tokens of a.txt" in tables["setting"]
    assert "| mending | no | nothing gained | 0.1 |" in tables["steps"]
    drawn = one_command.figure(one_command.results())
    assert ">b<" in drawn
    assert ">c<" in drawn


def test_what_a_step_said_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.touch()
    assert one_command.told(f"-9% on {text}", ["--text", str(text)]) == "-9% on a.txt"


def test_a_result_that_is_there_is_drawn_and_not_measured(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_command.main(unseen=["nowhere.txt"], model=Model("tiny"))
    assert "already measured" in capsys.readouterr().out
    assert (results / "recovery.svg").is_file()


def test_the_commit_names_the_files_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lyapunov_prune").mkdir()
    file = tmp_path / "lyapunov_prune" / "a.py"
    file.write_text("a = 1")
    monkeypatch.setattr(common, "__file__", str(tmp_path / "experiments" / "common.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    assert len(common.committed()) == 12
    file.write_text("a = 2")
    with pytest.raises(LyapunovPruneError):
        common.committed()
