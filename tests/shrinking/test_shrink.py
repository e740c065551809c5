"""A model shrunk from end to end, on a tiny one: what is written, what is dropped, and what is refused."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import VOCABULARY, judge_briefly, make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.forward import own_text
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.results.history import history_of
from lyapunov_prune.sensitivity.sweep import Sweep
from lyapunov_prune.shrinking import healing as healing_module
from lyapunov_prune.shrinking import request, texts
from lyapunov_prune.shrinking import shrink as module
from lyapunov_prune.shrinking.report import Shrinking

SMALL: dict[str, Any] = {"tokens": 32 * 24, "context": 24}
WORDS = {"vocab_size": len(VOCABULARY)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of healing, and few tokens to evaluate on, to judge by and to time."""
    judge_briefly(monkeypatch, context=24)
    monkeypatch.setattr(healing_module, "STEPS", 3)
    monkeypatch.setattr(texts, "EVALUATED", 256)


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_what_is_written_is_what_is_returned(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, healing_kept: None
) -> None:
    before, out = state(reader), tmp_path / "out"
    done = lp.shrink(reader, tokenizer, out, remove=2, folder=tmp_path / "jobs", **SMALL)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert {k: v.tolist() for k, v in loaded.state_dict().items()} == {
        k: v.tolist() for k, v in done.model.state_dict().items()
    }
    assert find_structure(loaded).num_layers == 4
    report = Shrinking.load(out / "shrink.json")
    assert report.to_json() == done.report.to_json()
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    assert report.plan.remove == BestRemoval.load(out / "best.json").remove
    assert report.evaluation.to_json() == Evaluation.load(out / "eval.json").to_json()
    assert Healing.load(out / "healing.json").steps == 3
    assert Provenance.load(out / "provenance.json").commands == report.commands
    assert [step.name for step in report.steps if step.kept][-1] == "healing"
    assert [step.kind for step in history_of(done.model).steps] == ["prune", "heal"]
    assert report.parameters == (reader.num_parameters(), loaded.num_parameters())
    assert report.size == (4 * report.parameters[0], 4 * report.parameters[1])
    assert len(report.answer()) <= 8
    assert Provenance.load(out / "provenance.json").alone == report.alone
    assert not list((tmp_path / "jobs").glob("shrinking-*"))  # what was measured stays
    after = state(reader)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert history_of(reader).steps == ()


def test_a_step_that_does_not_pay_is_dropped_and_named(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Healing, "kept", property(lambda self: -1))
    done = lp.shrink(reader, tokenizer, tmp_path / "out", remove=1, **SMALL)
    healing = done.report.steps[-1]
    assert (healing.name, healing.kept) == ("healing", False)
    assert "healing" in done.report.answer()[3].partition("dropped: ")[2]
    assert not (tmp_path / "out" / "healing.json").exists()
    assert [step.kind for step in history_of(done.model).steps] == ["prune"]
    with torch.no_grad():  # the caller's to change
        done.model.get_input_embeddings().weight.zero_()
    assert reader.get_input_embeddings().weight.abs().sum() > 0


def test_a_model_in_training_stays_so_and_no_state_changes(
    tokenizer: PreTrainedTokenizerFast, reader: PreTrainedModel
) -> None:
    model = make_tiny("llama", vocab_size=reader.config.vocab_size).train()
    model.get_input_embeddings().requires_grad_(False).eval()
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    trains = {name: part.training for name, part in model.named_modules()}
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    modes = process_modes()
    lp.shrink(lp.wrap(model), tokenizer, remove=1, **SMALL)
    assert {name: part.training for name, part in model.named_modules()} == trains
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == learns
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert str(np.random.get_state()) == str(numpy_state)
    assert random.getstate() == python_state
    assert process_modes() == modes


def process_modes() -> tuple[Any, ...]:
    """What a library may switch for the whole process."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        transformers.logging.get_verbosity(),
        transformers.logging.is_progress_bar_enabled(),
        list(warnings.filters),
    )


def test_half_precision_is_healed_by_updates_of_low_rank(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, healing_kept: None, tmp_path: Path
) -> None:
    model = make_tiny("llama", vocab_size=reader.config.vocab_size).to(torch.bfloat16)
    done = lp.shrink(model, tokenizer, tmp_path / "out", remove=1, **SMALL)
    assert Healing.load(tmp_path / "out" / "healing.json").rank == 16
    assert done.model.dtype == torch.bfloat16
    assert any("--update-rank 16 --dtype bfloat16" in command for command in done.report.commands)


def timed_alone(reading: Reading, prompts: torch.Tensor, steps: int, choose: Any) -> torch.Tensor:
    """The few tokens by which the time of writing is told; no window of the text."""
    assert steps < SMALL["context"] - 1, "written again"
    return continued(reading, prompts, steps, choose)


def test_what_goes_on_ends_as_if_it_had_never_stopped(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    healing_kept: None,
) -> None:
    whole = lp.shrink(reader, tokenizer, remove=2, **SMALL)

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    kept: dict[str, Any] = {"folder": tmp_path / "jobs", **SMALL}
    monkeypatch.setattr(healing_module, "heal", killed)
    with pytest.raises(KeyboardInterrupt):
        lp.shrink(reader, tokenizer, tmp_path / "out", remove=2, **kept)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(healing_module, "heal", heal)
    monkeypatch.setattr(request, "count_for", lambda *_: pytest.fail("counted again"))
    monkeypatch.setattr(own_text, "continued", timed_alone)
    monkeypatch.setattr("lyapunov_prune.ranking.best.angular_distance", lambda *_, **__: pytest.fail("ranked again"))
    done = lp.shrink(reader, tokenizer, tmp_path / "out", remove=2, **kept)
    assert done.report.plan.to_json() == whole.report.plan.to_json()
    assert {k: v.tolist() for k, v in done.model.state_dict().items()} == {
        k: v.tolist() for k, v in whole.model.state_dict().items()
    }
    assert not list((tmp_path / "jobs").glob("shrinking-*"))


def test_other_minutes_and_a_refusal_delete_no_finished_search(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both deleted it; with other minutes it was measured again."""
    kept: dict[str, Any] = {"folder": tmp_path, **SMALL}
    monkeypatch.setattr(healing_module, "heal", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lp.shrink(reader, tokenizer, remove=2, **kept)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for refused in ({"remove": 6}, {"remove": 2, "minutes": 1e-4}, {"max_kl": 1e-9}):
        with pytest.raises(lp.LyapunovPruneError):
            lp.shrink(reader, tokenizer, **refused, **kept)
    assert all(path.read_bytes() == content for path, content in before.items())
    monkeypatch.setattr(own_text, "continued", timed_alone)
    monkeypatch.setattr("lyapunov_prune.ranking.best.angular_distance", lambda *_, **__: pytest.fail("ranked again"))
    monkeypatch.setattr(Sweep, "_measure", lambda *_: pytest.fail("checked again"))
    with pytest.raises(KeyboardInterrupt):
        lp.shrink(reader, tokenizer, remove=2, minutes=10, **kept)


def test_another_request_takes_nothing_of_the_last(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing_module, "heal", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lp.shrink(reader, tokenizer, remove=2, folder=tmp_path, **SMALL)
    monkeypatch.setattr(healing_module, "heal", heal)
    done = lp.shrink(reader, tokenizer, remove=1, folder=tmp_path, **SMALL)
    assert done.report.plan.to_json() == lp.shrink(reader, tokenizer, remove=1, **SMALL).report.plan.to_json()


def test_a_removal_that_fails_the_gate_is_not_healed(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = module.cut

    def wrong(*arguments: Any, **more: Any) -> Any:
        made = cut(*arguments, **more)
        made.model.model.norm = torch.nn.Identity()
        return made

    monkeypatch.setattr(module, "cut", wrong)
    monkeypatch.setattr(healing_module, "heal", lambda *_, **__: pytest.fail("healed"))
    with pytest.raises(CheckFailed, match="same as skipping"):
        lp.shrink(reader, tokenizer, remove=1, **SMALL)


# Time.


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds of a forward of one window, and lets the model write in no time."""

    def seconds(window: float) -> None:
        monkeypatch.setattr("lyapunov_prune.shrinking.cost.window_seconds", lambda *_: window)
        monkeypatch.setattr("lyapunov_prune.shrinking.cost.writing_seconds", lambda *_: 0.0)

    return seconds


def test_minutes_in_which_nothing_can_be_chosen_are_refused(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, timed: Callable[[float], None]
) -> None:
    timed(10.0)
    with pytest.raises(LyapunovPruneError, match=r"give minutes=\d+"):
        lp.shrink(reader, tokenizer, remove=1, minutes=1.0, **SMALL)


def test_steps_without_time_are_skipped_and_named(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    timed: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(0.25)
    monkeypatch.setattr(healing_module, "heal", lambda *_, **__: pytest.fail("healed"))
    left, cut = [44.0], module.cut

    def late(*arguments: Any, **more: Any) -> Any:
        left[0] = 20.0
        return cut(*arguments, **more)

    monkeypatch.setattr(module, "cut", late)
    monkeypatch.setattr(request.Clock, "left", lambda self: left[0])
    done = lp.shrink(reader, tokenizer, remove=1, minutes=1.0, **SMALL)
    healing = done.report.steps[-1]
    assert (healing.name, healing.kept, healing.told) == ("healing", False, "no time left")


def test_minutes_bound_the_healing(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def noted(*arguments: Any, **more: Any) -> Any:
        given.update(more)
        return heal(*arguments, **{**more, "minutes": None, "steps": 1})

    monkeypatch.setattr(healing_module, "heal", noted)
    lp.shrink(reader, tokenizer, remove=1, minutes=30.0, **SMALL)
    assert given["steps"] is None
    assert 25 < given["minutes"] < 30


# What is refused, before a token is written.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 31 * 24}, "at least 768 tokens"),
        ({"tokens": 512 * 64, "context": 512}, "context 512 is longer"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"max_kl": 1.5}, "remove and max_kl are 2 targets"),
        ({"remove": 6}, "cannot remove 6"),
        ({"remove": 1.0}, "remove is 1.0"),
        ({"remove": 0}, "remove is 0"),
        ({"remove": None, "max_kl": 0.0}, "max_kl is 0.0"),
    ],
)
def test_bad_input_costs_no_forward(
    changes: dict[str, Any],
    words: str,
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(reader), "forward", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(LyapunovPruneError, match=words):
        lp.shrink(reader, tokenizer, **{"remove": 1, **SMALL, **changes})


def test_texts_that_share_tokens_are_refused(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.randint(3, 200, (33, 24), generator=torch.Generator().manual_seed(0))
    learn, held_out = (TokenBatch(part, "ids", "all", False) for part in (ids[:32], ids[30:]))
    with pytest.raises(LyapunovPruneError, match="share"):
        lp.shrink(reader, tokenizer, remove=1, batch=learn, evaluation=held_out)


def test_a_folder_that_is_not_empty_is_refused(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(LyapunovPruneError, match="not empty"):
        lp.shrink(reader, tokenizer, tmp_path, remove=1, **SMALL)
