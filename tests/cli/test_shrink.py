"""`lyapunov-prune shrink`: one command, the same as those by hand, and what it refuses before anything is loaded."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Done, judge_briefly
from safetensors.torch import load_file

from lyapunov_prune.cli.app import main
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.export import copied as on_disk
from lyapunov_prune.healing import state
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.models import loading
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.results.result import table_text
from lyapunov_prune.shrinking import healing as healing_module
from lyapunov_prune.shrinking import shrink as module
from lyapunov_prune.shrinking import texts
from lyapunov_prune.shrinking.report import Shrinking

SMALL = ["--tokens", f"{32 * 24}", "--context", "24"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing_module, "STEPS", 3)
    monkeypatch.setattr(texts, "EVALUATED", 512)
    judge_briefly(monkeypatch, context=24)


@pytest.mark.parametrize("text", [[], ["--text", "builtin"]], ids=["self", "builtin"])
def test_the_commands_by_hand_make_the_same_model(
    text: list[str], run: Callable[..., Done], healing_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "WIDE", 48)
    done = run("shrink", "tiny", "--remove", "25%", "-o", "out", *text, *SMALL)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].startswith("tiny without 2 of 6 layers")
    assert "GB of memory" in done.err
    commands = Provenance.load("out/provenance.json").commands
    assert [shlex.split(command)[1] for command in commands] == ["prune", "heal", "eval", "eval"]
    assert ["--context 48" in command for command in commands[:2]] == [True, False]  # wide windows choose
    made, card = load_file("out/model.safetensors"), Path("out/README.md").read_text()
    assert all(command in card for command in commands)
    Path("out").rename("shrunk")
    scored = []
    for command in commands:
        again = run(*shlex.split(command)[1:])
        assert again.code == 0, again.err
        if " eval " in command:
            scored.append(Evaluation.load("runs/out/eval.json").perplexities)
    by_hand = load_file("out/model.safetensors")
    assert by_hand.keys() == made.keys()
    assert all(torch.equal(by_hand[name], made[name]) for name in made)
    report = Shrinking.load("shrunk/shrink.json")
    told = [report.evaluation.perplexities, report.foreign]
    # `eval` also compares the models on the second text, from the same logits in float64.
    np.testing.assert_allclose(*([[p.nll for p in pair] for pair in pairs] for pairs in (told, scored)), rtol=1e-6)
    assert [dense.measured_on.text for dense, _ in told] == ["builtin", "code"]
    assert all(words in card for words in ("of the kind that it", "of a kind that no step has seen"))


def test_the_cost_is_said_and_report_prints_every_set_that_was_tried(run: Callable[..., Done]) -> None:
    done = run("shrink", "tiny", "--remove", "2", "-o", "out", "--text", "builtin", *SMALL)
    assert json.loads(Path("out/shrink.json").read_text())["folder"] == "out"
    assert "GB of disk" in done.err
    assert Path("out/report.html").is_file()
    done = run("report", "out/best.json")
    assert done.code == 0, done.err
    assert all(line in done.out for line in table_text(BestRemoval.load("out/best.json").summary()).splitlines())


def test_a_task_without_generated_answers_is_told_to_hide_much(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    rows = [{"query": f"{i} is", "choices": ["a", "b"], "gold": i % 2} for i in range(12)]
    Path("items.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run("shrink", "tiny", "--max-drop", "items.jsonl:0.9", "-o", "out", *SMALL)
    assert done.code == 130, done.err
    assert "as gsm8k" in done.err
    rows = [{"question": f"{i} and 1?", "answer": f"#### {i + 1}"} for i in range(12)]
    Path("asked.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run("shrink", "tiny", "--max-drop", "asked.jsonl:0.9", "-o", "out", *SMALL)
    assert "as gsm8k" not in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--remove", "2", "--max-kl", "1.2"], "--remove and --max-kl are 2 targets"),
        (["--remove", "100%"], "share below 100%"),
        (["--remove", "3-7"], "neither a number"),
        (["--remove", "2", "-o", "tiny"], "not empty"),
        (["--remove", "2", "--text", "missing.txt"], "no readable file"),
        (["--remove", "2", "--judge", "self"], "give another text as --judge"),
        (["--remove", "2", "--device", "spread"], "on one device"),
    ],
)
def test_bad_input_waits_for_no_model(
    arguments: list[str], words: str, run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    assert words in run_bad("shrink", "tiny", *(["-o", "out"] if "-o" not in arguments else []), *arguments)


def test_a_model_too_large_for_memory_is_told_of_streaming(
    run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "free_memory", lambda _: 10)
    assert "prune --device disk" in run_bad("shrink", "tiny", "--remove", "2", "-o", "out").replace("\n", " ")


def test_a_text_too_short_to_judge_by_says_how_long_it_must_be(run_bad: Callable[..., str]) -> None:
    line = run_bad("shrink", "tiny", "--remove", "2", "-o", "out", "--tokens", "240", "--context", "24")
    assert "at least 768 tokens" in line


def test_what_is_killed_goes_on(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    heal = healing_module.heal

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(healing_module, "heal", killed)
    command = ["shrink", "tiny", "--remove", "2", "-o", "out", *SMALL]
    assert run(*command).code == 130
    assert not Path("out").exists()
    monkeypatch.setattr(healing_module, "heal", heal)
    monkeypatch.setattr("lyapunov_prune.ranking.best.angular_distance", lambda *_, **__: pytest.fail("ranked again"))
    assert run(*command).code == 0
    assert not list(Path("runs/jobs").glob("shrinking-*"))


def test_a_process_killed_while_it_heals_goes_on_to_the_same_weights(
    checkpoint: Path, healing_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    monkeypatch.setattr(healing_module, "STEPS", 40)  # enough for trials and rounds
    monkeypatch.setattr(state, "SECONDS", 0.0)  # the state of every step is written
    monkeypatch.setattr(state, "_SHARE", math.inf)
    take_step = Distillation.take_step

    def shrunk(steps: int, output: str, *more: str) -> int | None:
        """The exit code of a process that is killed after so many steps."""
        left = [steps]

        def counted(self: Distillation, inputs: torch.Tensor, rate: float) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            take_step(self, inputs, rate)

        monkeypatch.setattr(Distillation, "take_step", counted)
        command = ["shrink", "tiny", "--remove", "2", "--text", "builtin", *SMALL, "-o", output, *more]
        monkeypatch.setattr(sys, "argv", ["lyapunov-prune", *command])
        process = multiprocessing.get_context("fork").Process(target=main)
        process.start()
        process.join()
        return process.exitcode

    assert shrunk(-1, "whole") == 0
    assert shrunk(20, "out") == -signal.SIGKILL
    assert not Path("out").exists()
    assert shrunk(30, "out") == 0  # fewer steps than the whole run takes
    whole, resumed = (load_file(f"{folder}/model.safetensors") for folder in ("whole", "out"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert Provenance.load("out/provenance.json").commands[1].startswith("lyapunov-prune heal")
