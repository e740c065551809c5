"""`heal`: teachers, interrupted runs and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCABULARY, disk_full
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lyapunov_prune.healing import state as training_state
from lyapunov_prune.healing.distillation import Distillation
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.models import loading
from lyapunov_prune.pruning.provenance import Provenance

TEXT = ("--tokens", "128", "--context", "16")  # eight windows, of which four judge


@pytest.mark.usefixtures("healing_kept")
def test_a_pruned_model_is_healed_by_the_one_it_came_from(run: Any, pruned: Any) -> None:
    pruned("1,3")
    done = run(
        "heal",
        "out",
        "-o",
        "healed",
        "--teacher",
        "tiny",
        "--steps",
        "3",
        "--update-rank",
        "2",
        "--text",
        "builtin",
        *TEXT,
    )
    assert done.code == 0
    report = Healing.load("healed/healing.json")
    assert (report.steps, report.rank) == (3, 2)
    assert not list(Path("runs/jobs").glob("*/training-state-*"))
    assert Provenance.load("healed/provenance.json").plan.remove == (1, 3)
    AutoModelForCausalLM.from_pretrained("healed")
    assert "--teacher" in run("heal", "tiny", "-o", "again", "--steps", "1", *TEXT).err


def test_where_nothing_beats_the_pruned_model_nothing_is_written(
    run: Any, pruned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Healing, "kept", -1)
    pruned("1,3")
    heal = ("heal", "out", "-o", "healed", "--teacher", "tiny", "--minutes", "0.01", *TEXT)
    for more in ((), ("--update-rank", "2")):
        done = run(*heal, *more)
        assert done.code == 1
        assert "healed was not written" in done.err
        assert not Path("healed").exists()
        assert not list(Path("runs/jobs").glob("healing-*"))
        assert "Nothing kept" in done.out


@pytest.mark.usefixtures("healing_kept")
def test_half_precision_is_healed_by_updates_of_low_rank(run: Any, pruned: Any, run_bad: Any) -> None:
    pruned("1,3")
    heal = ("heal", "out", "-o", "healed", "--teacher", "tiny", "--steps", "2", "--dtype", "bfloat16", *TEXT)
    assert "--update-rank" in run_bad(*heal)
    done = run(*heal, "--update-rank", "2")
    assert done.code == 0, done.err
    assert AutoModelForCausalLM.from_pretrained("healed").dtype == torch.bfloat16


def test_layers_are_shared_out_by_several_processes_only(run_bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load", pytest.fail)
    heal = ("heal", "out", "-o", "healed", "--teacher", "tiny", "--shard", *TEXT)
    assert "accelerate launch" in run_bad(*heal)
    assert "--update-rank or --shard" in run_bad(*heal, "--update-rank", "2")


def test_a_strangers_provenance_does_not_choose_what_is_loaded(
    run: Any, pruned: Any, run_bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned("1,3")
    made = Path("out/provenance.json")
    content = json.loads(made.read_text())
    for source in ("tiny", "someone/large", "/etc", "\x1b[2J\nerror: no"):
        made.write_text(json.dumps(content | {"source": source}))
        monkeypatch.setattr(loading, "load", pytest.fail)
        told = run_bad("heal", "out", "-o", "healed", "--steps", "1", *TEXT)
        assert f"was made from {source!r}" in told
        assert "\x1b" not in told


@pytest.mark.usefixtures("healing_kept")
def test_the_built_in_model_teaches_without_being_named(run: Any, pruned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned("1,3")
    made = Path("out/provenance.json")
    made.write_text(json.dumps(json.loads(made.read_text()) | {"source": loading.BUILTIN}))
    monkeypatch.setattr(loading, "builtin_folder", lambda: Path("tiny"))
    assert run("heal", "out", "-o", "healed", "--steps", "1", *TEXT).code == 0


def test_a_teacher_of_other_weights_than_those_pruned_is_refused(run: Any, pruned: Any, run_bad: Any) -> None:
    pruned("1,3")
    shutil.copytree("tiny", "tuned")
    weights = load_file("tuned/model.safetensors")
    weights["model.layers.4.mlp.up_proj.weight"][3, 3] += 0.01
    save_file(weights, "tuned/model.safetensors", {"format": "pt"})
    told = run_bad("heal", "out", "-o", "healed", "--teacher", "tuned", "--steps", "1", *TEXT)
    assert "'tiny' (out/provenance.json)" in told


def test_models_that_read_text_otherwise_are_not_compared(run: Any, run_bad: Any) -> None:
    shutil.copytree("tiny", "other")
    names = VOCABULARY[:3] + VOCABULARY[-2:2:-1] + VOCABULARY[-1:]
    content = json.loads(Path("tiny/tokenizer.json").read_text())
    content["model"]["vocab"] = {name: i for i, name in enumerate(names)}
    Path("other/tokenizer.json").write_text(json.dumps(content))
    for command in (
        ("eval", "tiny", "--against", "other"),
        ("hierarchy", "other", "tiny"),
        ("heal", "tiny", "--teacher", "other", "-o", "healed"),
    ):
        told = run_bad(*command, *TEXT)
        assert "(token '!' has id 258 and id 3)" in told
    # Both models are given the same ids.
    assert "have different vocabularies (id 3 is" in run_bad("check", "other", "tiny", *TEXT)
    explained = run("explain", "other", "tiny", *TEXT)
    assert (explained.code, "other tokens" in explained.out) == (2, True)


@pytest.mark.usefixtures("healing_kept")
def test_a_pruned_model_learns_from_what_the_dense_one_writes(run: Any, pruned: Any) -> None:
    pruned("1,3")
    done = run("heal", "out", "-o", "healed", "--teacher", "tiny", "--steps", "2", *TEXT)
    assert done.code == 0, done.err
    report = Healing.load("healed/healing.json")
    assert report.measured_on.text.startswith("written by")
    assert report.held_out is not None
    assert report.held_out.after.measured_on.split == "evaluation"


@pytest.mark.usefixtures("healing_kept")
def test_a_healed_model_is_scored_as_eval_scores_it(run: Any) -> None:
    config = json.loads(Path("tiny/config.json").read_text())
    Path("tiny/config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    assert run("prune", "tiny", "--layers", "1,3", "-o", "out", *TEXT).code == 0
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2")
    for more, learnt, scored in (
        (["--tokens", "2048"], 256, 512),
        (["--tokens", "1024", "--context", "128"], 128, 128),
    ):
        assert run(*heal, *more, "-o", f"healed-{scored}").code == 0
        report = Healing.load(f"healed-{scored}/healing.json")
        assert report.held_out is not None
        assert (report.measured_on.context, report.held_out.after.measured_on.context) == (learnt, scored)


@pytest.mark.usefixtures("healing_kept")
def test_two_ways_to_heal_one_model_run_side_by_side(run: Any, pruned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins where the other has a state, and is killed: each goes on from its own."""
    pruned("1,3")
    heal = ("heal", "out", "--teacher", "tiny", "--update-rank", "2", *TEXT)
    take_step = Distillation.take_step

    def killed(self: Distillation, window: torch.Tensor, rate: float) -> None:
        if self.step == 2:
            raise KeyboardInterrupt
        take_step(self, window, rate)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "take_step", killed)
        patch.setattr(training_state, "SECONDS", 0.0)
        patch.setattr(training_state, "_SHARE", math.inf)
        for output, steps in (("a", "3"), ("b", "4"), ("./c/a", "5")):
            assert run(*heal, "-o", output, "--steps", steps).code == 130
    taken: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "take_step", lambda self, *a: (taken.append(self.step), take_step(self, *a)))
        for output, steps in (("c/a", "5"), ("a", "3"), ("b", "4")):
            assert run(*heal, "-o", output, "--steps", steps).code == 0
            assert Healing.load(f"{output}/healing.json").steps == int(steps)
    assert taken == [2, 3, 4, 2, 2, 3]
    assert not list(Path("runs/jobs").glob("healing-*"))


def test_heal_looks_at_the_disk_before_it_trains(
    run: Any, pruned: Any, run_bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned("1,3")
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2", "-o", "healed", *TEXT)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**5))
    assert "files of the healed model" in run_bad(*heal)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("healing_kept")
def test_a_full_disk_leaves_what_was_trained_and_says_so(
    run: Any, pruned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned("1,3")
    heal = ("heal", "out", "--teacher", "tiny", "--steps", "2", "-o", "healed", *TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", disk_full)
        done = run(*heal)
    assert done.code == 2
    assert "run again" in done.err
    monkeypatch.setattr(Distillation, "take_step", lambda *_: pytest.fail("it was trained already"))
    assert run(*heal).code == 0
