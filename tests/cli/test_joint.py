"""The command `joint`: what it writes, and one line and no file for whatever is wrong."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import Done

from lyapunov_prune.export import compact_gate
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.joint import points
from lyapunov_prune.joint import search as module
from lyapunov_prune.joint.result import JointRun
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance

JOINT = ["joint", "tiny", "-o", "out"]
TEXT = ["--tokens", "800", "--context", "32"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model has no pair that selection could tell from another, and a process takes seconds to start."""
    command = importlib.import_module("lyapunov_prune.cli.commands.joint")
    monkeypatch.setattr(command, "STEPS", 1)
    monkeypatch.setattr(command, "LAST_STEPS", 1)
    monkeypatch.setattr(module, "_selection_error", lambda *_: 0.0)
    monkeypatch.setattr(points, "_warn_of_noise", lambda *_: None)
    verify = compact_gate.verify_compact
    monkeypatch.setattr(
        compact_gate, "verify_compact", lambda *args, **options: verify(*args, **options, elsewhere=False)
    )


@pytest.mark.usefixtures("drawn")
def test_a_checkpoint_with_its_decision_and_its_report(run: Callable[..., Done]) -> None:
    done = run(*JOINT, "--remove", "17%", *TEXT)  # of 12
    assert (done.code, done.err) == (0, "")
    assert {"out/model.safetensors", "out/joint.json", "out/plan.json", "out/report.html"} <= done.changed
    assert not list(Path("runs/jobs").glob("joint-removal-*"))
    result = JointRun.load("out/joint.json")
    assert sum(result.decision.chosen) == 2
    assert "Remove" in done.out
    *_, concluded, following = done.out.splitlines()
    assert concluded == result.conclusion() != ""
    ratio = result.against_dense()
    assert ratio is not None
    named = "eval out --against tiny --speed" if ratio.is_good else "explain tiny out"
    assert following == f"Next: lyapunov-prune {named}"
    page = Path("out/report.html").read_text()
    for word in ("Joint removal", "Pairs of the budget", "Recovered points", "Importance within each type", "together"):
        assert word in page
    told = Path("out/README.md").read_text()
    attention, activation = result.decision.chosen
    parts = (attention, "attentions"), (activation, "activations")
    for line in (
        f"{attention} attentions and {activation} activations are removed",
        "The budget is 2 to remove. Of 3 pairs that meet it",
        "The choice is " + ("certain" if result.decision.certain else "not certain"),
        f"The noise is at most {result.decision.noise:.3g}",
        "model-index:",
        f"# tiny without {' and '.join(f'{n} {part}' for n, part in parts if n)}",
        f"not used above: {result.chosen:.4g}, dense {result.dense:.4g}",
        "    lyapunov-prune joint tiny --remove 2 --reduction affine -o OUT",
    ):
        assert line in told
    assert "not been\ntrained" not in told


@pytest.mark.usefixtures("healing_kept")
def test_every_command_takes_what_comes_out(run: Callable[..., Done]) -> None:
    """As what `prune --what attention` writes: it says what it was made from, and heals by that alone."""
    assert run(*JOINT, "--remove", "1", *TEXT).code == 0
    provenance = Provenance.load("out/provenance.json")
    assert provenance.plan.to_json() == PruningPlan.load("out/plan.json").to_json()
    assert (provenance.source, provenance.format, provenance.gate.passed) == ("tiny", "compact", True)
    few = ("--tokens", "256", "--context", "32")
    assert run("eval", "out", *few).code == 0
    assert run("profile", "out", *few).code == 0
    assert run("hierarchy", "tiny", "out", *few, "--new-tokens", "2").code == 0
    heal = ("heal", "out", "-o", "healed", "--steps", "1", *few)
    told = run(*heal)
    assert (told.code, told.changed) == (2, set())
    assert "made from 'tiny'" in told.err
    told = run(*heal, "--teacher", "out")
    assert (told.code, told.changed) == (2, set())
    assert "made from" in told.err
    done = run(*heal, "--teacher", "tiny")
    assert done.code == 0, done.err
    assert Provenance.load("healed/provenance.json").source == "tiny"


def test_interrupted_it_goes_on_to_the_same_decision(run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*JOINT, "--remove", "1", *TEXT).code == 0
    Path("out").rename("whole")
    take_step = Distillation.take_step
    left = [2]

    def interrupt(self: Distillation, inputs: torch.Tensor, rate: float) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        take_step(self, inputs, rate)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "take_step", interrupt)
        assert run(*JOINT, "--remove", "1", *TEXT).code == 130
    assert not Path("out").exists()
    assert run(*JOINT, "--remove", "1", *TEXT).code == 0
    decisions = [json.loads(Path(folder, "joint.json").read_text())["decision"] for folder in ("out", "whole")]
    assert decisions[0] == decisions[1]
    assert Path("out/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--remove"),
        (["--remove", "0"], "'0'"),
        (["--remove", "100%"], "'100%'"),
        (["--remove", "12"], "12 to remove"),
        (["--remove", "2", "--reduction", "identity"], "reduction identity"),
        (["--remove", "2", "--tokens", "96", "--context", "32"], "three slices"),
        (["--remove", "2", "--tokens", "640"], "4 items"),
        (["--remove", "2", "-o", "tiny"], "tiny exists"),
    ],
)
def test_bad_input(options: list[str], told: str, run: Callable[..., Done]) -> None:
    done = run(*JOINT, *TEXT, *options)
    assert (done.code, done.out, done.changed) == (2, "", set()), done
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert told in done.err
