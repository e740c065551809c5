"""As many layers as keep what is lost within a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LAYERS, judge_briefly, operated
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.evaluation import harness_tasks
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.evaluation.tasks import evaluate_tasks, halves, load_tasks
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.shrinking import healing as healing_module
from lyapunov_prune.shrinking import request as request_module
from lyapunov_prune.shrinking import texts
from lyapunov_prune.shrinking.choosing import Chooser
from lyapunov_prune.shrinking.report import main_score
from lyapunov_prune.shrinking.request import Request
from lyapunov_prune.shrinking.target import Target
from lyapunov_prune.shrinking.texts import Texts
from lyapunov_prune.shrinking.within import Worsening, divergence, drop_of, largest

SMALL: dict[str, Any] = {"tokens": 32 * 24, "context": 24}


@pytest.fixture
def chooser(reader: PreTrainedModel) -> Chooser:
    generator = torch.Generator().manual_seed(0)
    learn, judge = (
        TokenBatch(torch.randint(3, 200, (n, 24), generator=generator), "ids", "all", False) for n in (16, 8)
    )
    return Chooser(read(wrap(reader), learn), judge, search=None, folder=None, batch_size=1)


@dataclass
class Counted:
    """A chooser whose choices are numbers."""

    reading: Reading

    def choose(self, count: int) -> Any:
        return count


@pytest.mark.parametrize(("allowed", "count"), [(0.1, 1), (0.35, 3), (0.5, 5), (9.0, LAYERS - 1)])
def test_the_most_layers_within_the_target(allowed: float, count: int, chooser: Chooser) -> None:
    counted: Any = Counted(chooser.reading)
    found, loss = largest(Target("max_kl", allowed), counted, lambda choice: choice / 10)  # type: ignore[arg-type,operator]
    assert found == count
    assert loss == count / 10


def test_one_layer_too_many_says_what_it_costs(reader: PreTrainedModel, chooser: Chooser) -> None:
    with pytest.raises(LyapunovPruneError, match=r"costs 0\.7"):
        largest(Target("max_kl", 0.1), chooser, lambda choice: 0.7 * len(choice.plan.remove))


@torch.no_grad()
def test_the_worsening_is_that_of_the_model_that_is_cut(reader: PreTrainedModel, chooser: Chooser) -> None:
    choice, worsening = chooser.choose(2), Worsening(reader)
    checking = apart(chooser.reading, of=2, most=None)[1].batch
    smaller = operated(reader, choice.plan, mends=choice.mends)
    expected = perplexity(smaller, checking).ratio_to(perplexity(reader, checking))
    assert worsening(choice) == pytest.approx(expected.high, rel=1e-4)
    tried = worsening.tried()
    assert tried is not None
    assert (tried.names, tried.ratio[0]) == (("without 2 layers",), pytest.approx(expected.value, rel=1e-4))
    assert tried.taken == (0 if expected.is_good else None)


def test_nothing_that_costs_little_is_a_failed_check(reader: PreTrainedModel, chooser: Chooser) -> None:
    with pytest.raises(CheckFailed):
        largest(Target.of(), chooser, lambda choice: 1.2)


@torch.no_grad()
def test_the_divergence_is_that_of_the_model_that_is_cut(reader: PreTrainedModel, chooser: Chooser) -> None:
    choice = chooser.choose(2)
    smaller = operated(reader, choice.plan, mends=choice.mends)
    checking = apart(chooser.reading, of=2, most=None)[1].batch.ids
    p, q = (m(checking).logits[:, :-1].double().log_softmax(-1) for m in (reader, smaller))
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence(reader, chooser, choice) == pytest.approx(expected, rel=1e-4)


# Tasks.


@pytest.fixture
def items(tmp_path: Path) -> Path:
    rows = [{"query": f"item {i}\u2028 is", "choices": ["a", "b"], "gold": i % 2} for i in range(12)]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def test_a_drop_is_of_the_choosing_half(
    items: Path, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chooser: Chooser
) -> None:
    choose, _ = halves(str(items))
    choice = chooser.choose(2)
    models = {"dense": reader, "cut": operated(reader, choice.plan, mends=choice.mends)}
    scores = evaluate_tasks(models, tokenizer, [choose]).scores
    dense, smaller = (main_score([s for s in scores if s.model == name]).value for name in models)
    assert drop_of(reader, tokenizer, choose, 1)(choice) == pytest.approx(dense - smaller)


# From end to end.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing_module, "STEPS", 1)
    monkeypatch.setattr(texts, "EVALUATED", 256)
    judge_briefly(monkeypatch, context=24)


@pytest.mark.usefixtures("quick")
def test_a_divergence_is_kept(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    done = lp.shrink(reader, tokenizer, max_kl=50.0, **SMALL)
    assert len(done.report.plan.remove) == LAYERS - 1
    assert "nats a token" in done.report.steps[0].told
    with pytest.raises(LyapunovPruneError, match="no layer can be removed"):
        lp.shrink(reader, tokenizer, max_kl=1e-6, **SMALL)


@pytest.mark.usefixtures("quick")
def test_without_a_target_what_was_tried_is_reported(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lyapunov_prune.shrinking.target.GOOD", 1e9)
    report = lp.shrink(reader, tokenizer, **SMALL).report
    assert len(report.plan.remove) == LAYERS - 1
    assert report.tried is not None
    assert report.further() == [report.tried]
    assert f"without {LAYERS - 1} layers" in report.tried.names
    assert report.tried.measured_on.text_hash != report.measured_on[0].text_hash


@pytest.mark.usefixtures("quick")
def test_a_task_is_reported_on_the_items_that_are_held_out(
    items: Path, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    report = lp.shrink(reader, tokenizer, max_drop=f"{items}:0.9", **SMALL).report
    assert report.evaluation.tasks is not None
    assert report.evaluation.tasks.tasks[0].items == 6
    assert "items " in report.answer()[2]
    assert f"--tasks {items}" in report.commands[-2]


@pytest.mark.usefixtures("quick")
def test_a_task_of_the_harness_is_taken_by_name(
    items: Path, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    (local,) = load_tasks([items])
    asked: list[str] = []

    def found(names: list[str], few_shot: int | None) -> dict[str, Any]:
        asked.extend(names)
        return {"by_name": local.harness}

    monkeypatch.setattr(harness_tasks, "hub_tasks", found)
    report = lp.shrink(reader, tokenizer, max_drop="items_by_name:0.9", **SMALL).report
    assert asked == ["items_by_name"]
    assert report.evaluation.tasks is not None
    assert [(t.name, t.source, t.items) for t in report.evaluation.tasks.tasks] == [
        ("by_name", "lm-evaluation-harness, held out", 6)
    ]
    assert "--tasks items_by_name" in report.commands[-2]


def test_the_cost_counts_the_searches(reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    texts_of = Texts(None, None, None, 32 * 24, 24)
    alone = Request(reader, tokenizer, Target.of(2), texts_of).estimate(2)
    assert (alone.searches, alone.search) == (1, 5 + 2 * 4 / 32)


def test_the_cost_counts_the_answers(
    items: Path, reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_module, "answering_seconds", lambda *_: 10.0)
    texts_of = Texts(None, None, None, 32 * 24, 24)
    asked = Request(reader, tokenizer, Target("max_drop", 0.02, str(items)), texts_of, items=halves(str(items)))
    expected = asked.estimate(None)
    # The dense model and every choice answer one half, both models the other one.
    assert expected.seconds["answering the task"] == 10.0 * (1 + expected.searches + 2) / 2
    assert (
        "answering the task" not in Request(reader, tokenizer, Target("max_kl", 1.0), texts_of).estimate(None).seconds
    )
