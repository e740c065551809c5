"""A model carries what made it, from step to step and through its files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import as_batch, make_tiny
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import compress, heal, load, rank_layers, remove_layers
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.models.loading import load_outline
from lyapunov_prune.profiles.profile import profile_layers
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.history import HISTORY, History, add_step, history_of, read_history


def some(seed: int) -> TokenBatch:
    ids = torch.randint(97, (8, 40), generator=torch.Generator().manual_seed(seed))
    return TokenBatch(ids, f"text {seed}", "calibration", bos=False)


def chosen(model: PreTrainedModel, batch: TokenBatch) -> PruningPlan:
    profile = profile_layers(model, batch, seeds=range(1))
    return rank_layers(profile.contraction, profile.influence, criterion="blend").plan(1)


def steps(history: History) -> list[tuple[str, list[str]]]:
    return [(step.kind, [on.text for on in step.saw]) for step in history.steps]


@pytest.fixture
def made(healing_kept: None) -> PreTrainedModel:
    """Pruned on text 1, compressed on 2, pruned by hand, healed on 3: all in memory."""
    dense = make_tiny("llama", vocab_size=260)
    model = remove_layers(dense, chosen(dense, some(1)))
    model = compress(model, some(2), method="wanda", sparsity=0.3).model
    model = remove_layers(model, [0])
    return heal(model, dense, some(3), steps=1).model


STEPS = [("prune", ["text 1"]), ("compress", ["text 2"]), ("prune", []), ("heal", ["text 3"])]


def test_every_step_is_kept(made: PreTrainedModel) -> None:
    assert steps(history_of(made)) == STEPS
    assert steps(history_of(copy.deepcopy(made))) == STEPS
    assert list(history_of(made).to_frame()["kind"]) == ["prune", "compress", "prune", "heal"]


def test_none_of_the_texts_scores_the_model(made: PreTrainedModel) -> None:
    for seed, number, kind in ((1, 1, "prune"), (2, 2, "compress"), (3, 4, "heal")):
        said = rf"made with text {seed} .*step {number} of its history, {kind}\)"
        with pytest.raises(LyapunovPruneError, match=said):
            require_unseen(made, some(seed))
    require_unseen(made, some(4))


@pytest.mark.parametrize("loader", ["load", "from_pretrained", "outline"])
def test_a_step_on_a_checkpoint_goes_on_with_its_history(
    loader: str,
    made: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pruned(made, tokenizer, chosen(made, some(4)), "first")
    wanted = [*STEPS, ("prune", ["text 4"])]
    assert steps(read_history("first")) == wanted
    if loader == "outline":
        outline = read_outline(Path("first"), "first")
        prune_on_disk(outline, PruningPlan.given(outline.identity, [0]), "second")
    else:
        again = load("first").model if loader == "load" else AutoModelForCausalLM.from_pretrained("first")
        if loader == "load":
            monkeypatch.chdir("/")  # the folder's name means nothing here
        write_pruned(again, tokenizer, PruningPlan.given(again, [0]), tmp_path / "second")
    found = read_history(tmp_path / "second")
    assert steps(found) == [*wanted, ("prune", [])]
    assert found.steps[-1].source == "first"


def test_merged_adapters_have_the_history_of_their_model(
    made: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write_pruned(made, tokenizer, chosen(made, some(4)), tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    loaded = load(tmp_path / "adapters")
    assert steps(history_of(loaded.model)) == [*STEPS, ("prune", ["text 4"])]


def test_a_model_that_nothing_made_has_no_history(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel
) -> None:
    assert history_of(load(checkpoint).model).steps == ()
    assert history_of(load_outline(checkpoint, "tiny").model).steps == ()
    monkeypatch.chdir(tmp_path)
    made = make_tiny("llama")
    add_step(made, "heal", [some(1).measured_on(llama)], llama)
    history_of(made).save(HISTORY)
    assert history_of(make_tiny("llama")).steps == ()  # it has no name, and was not loaded from here


@pytest.mark.usefixtures("healing_kept")
def test_a_teacher_hands_its_history_on() -> None:
    dense = make_tiny("llama")
    teacher = remove_layers(dense, chosen(dense, some(1)))
    student = remove_layers(teacher, [0])
    healed = heal(student, teacher, some(3), steps=1).model
    assert steps(history_of(healed)) == [("prune", ["text 1"]), ("prune", []), ("heal", ["text 3"])]
    taught = heal(remove_layers(dense, [0]), teacher, some(3), steps=1).model
    assert [kind for kind, _ in steps(history_of(taught))] == ["prune", "prune", "heal"]


def test_a_text_that_gave_two_measurements_counts_once(llama: PreTrainedModel) -> None:
    plan = chosen(llama, as_batch(llama, some(1)))
    assert len(plan.measured_on) == 2
    (step,) = history_of(remove_layers(llama, plan)).steps
    assert len(step.saw) == 1


def test_a_damaged_history_is_refused(checkpoint: Path) -> None:
    (checkpoint / HISTORY).write_text('{"kind": "History", "steps": [')
    with pytest.raises(LyapunovPruneError, match=r"history\.json.*this version"):
        load(checkpoint)


def test_healing_is_not_scored_on_what_the_pruning_saw() -> None:
    dense = make_tiny("llama")
    student = remove_layers(dense, chosen(dense, some(1)))
    with pytest.raises(LyapunovPruneError, match=r"text 1 .*history, prune"):
        heal(student, dense, some(2), steps=1, evaluation=some(1))
    assert heal(student, dense, some(2), steps=1, evaluation=some(3)).report.recovered is not None
