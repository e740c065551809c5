"""Tasks: what the harness is asked and told, against this project's own likelihoods and decoding; no network."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from helpers import ITEMS, VOCABULARY, by_definition, hooks_of, make_tiny, make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune.evaluation
from lyapunov_prune import LyapunovPruneError, NonFiniteError, evaluate_tasks, remove_layers
from lyapunov_prune.cli.app import main
from lyapunov_prune.evaluation import TaskScores, harness, harness_tasks, load_tasks
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.repetition import repetition
from lyapunov_prune.evaluation.task_scores import TaskScore
from lyapunov_prune.evaluation.tasks import halves
from lyapunov_prune.forward import reading
from lyapunov_prune.forward.decoding import continued
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.predictions import compare_choices
from lyapunov_prune.report.evaluation import _interval, tasks_figure

STEPS = 12
# Of different lengths, so that a batch is padded and not in the order of the file.
QUESTIONS = [{"question": f"{i}{' and 1' * i}, that is?", "answer": f"So it is.\n#### {i + 1},000"} for i in range(4)]


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(harness_tasks._GENERATION["generation_kwargs"], "max_gen_toks", STEPS)


@pytest.fixture(scope="module")
def writer() -> PreTrainedModel:
    return make_tiny("llama", vocab_size=len(VOCABULARY), max_position_embeddings=256)


def write(path: Path, rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A file of multiple choice and one of questions."""
    choices = [{"query": i.query, "choices": i.choices, "gold": i.gold} for i in ITEMS]
    return [write(tmp_path / "choices.jsonl", choices), write(tmp_path / "questions.jsonl", QUESTIONS)]


def asked(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, file: str, **options: Any) -> Any:
    """Samples of the harness by item, and the ids that it read."""
    task, *_ = load_tasks([file], few_shot=options.pop("few_shot", None))
    given = {"limit": None, "bos": False, "batch_size": 1, **options}
    found, read = harness.run(model, tokenizer, {task.name: task.harness}, **given)
    return {sample["doc_id"]: sample for sample in found["samples"][task.name]}, read


@pytest.mark.parametrize(("bos", "batch_size"), [(False, 1), (True, 3)])
def test_log_likelihoods_are_those_of_the_definition_and_of_compare_choices(
    bos: bool, batch_size: int, writer: PreTrainedModel, files: list[str]
) -> None:
    tokenizer = make_tokenizer(adds_bos=bos)
    samples, read = asked(writer, tokenizer, files[0], bos=bos, batch_size=batch_size)
    ours = compare_choices(writer, writer, ITEMS, tokenizer)
    for i, item in enumerate(ITEMS):
        found = np.array([answer[0][0] for answer in samples[i]["resps"]])
        np.testing.assert_allclose(found - found[0], np.array(ours.dense[i]) - ours.dense[i][0], atol=1e-4)
        if not item.query.endswith("\n"):  # which the harness scores with every choice
            np.testing.assert_allclose(found, by_definition(writer, tokenizer, item), rtol=1e-5)
    assert read[0] == tokenizer("Which melts? ice")["input_ids"]
    scores = evaluate_tasks({"dense": writer}, tokenizer, load_tasks(files[:1]))
    assert scores.score("dense", "choices", "acc").value == ours.accuracy("dense")
    assert scores.measured_on[0].bos is bos
    assert scores.tasks[0].chance == pytest.approx((1 / 3 + 1 / 4 + 1 / 2 + 1 / 2) / 4)


BLANKS = [
    {"context_options": ["The cat saw the dog so the cat", "The cat saw the dog so the dog"], "gold": 0},
    {"context_options": ["Ann", "Bob was late, so Bob", "Bob was late, so she"], "gold": 2},
    {"context_options": ["It is hot in here, and it", "It is hot in here, and she"], "gold": 1},
]


@pytest.fixture
def blanks(tmp_path: Path) -> str:
    """A file of the form of WinoGrande: the beginnings differ, and what is scored is the same."""
    return write(tmp_path / "blanks.jsonl", [{**row, "continuation": f"ran {i} away."} for i, row in enumerate(BLANKS)])


@pytest.mark.parametrize("bos", [False, True])
def test_partial_evaluation_scores_the_continuation_after_each_beginning(
    bos: bool, writer: PreTrainedModel, blanks: str
) -> None:
    tokenizer = make_tokenizer(adds_bos=bos)
    samples, _ = asked(writer, tokenizer, blanks, bos=bos)
    best = []
    for i, row in enumerate(BLANKS):
        wanted = []
        for beginning in row["context_options"]:  # type: ignore[attr-defined]
            ids, start = tokenizer(f"{beginning} ran {i} away.")["input_ids"], len(tokenizer(beginning)["input_ids"])
            with torch.no_grad():
                log_p = writer(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            wanted.append(float(log_p[range(start - 1, len(ids) - 1), ids[start:]].sum()))
        np.testing.assert_allclose([answer[0][0] for answer in samples[i]["resps"]], wanted, rtol=1e-5)
        best.append(int(np.argmax(wanted)) == row["gold"])
    scores = evaluate_tasks({"m": writer}, tokenizer, load_tasks([blanks]), bos=bos)
    assert scores.score("m", "blanks", "acc").items == tuple(map(float, best))
    assert scores.score("m", "blanks", "acc").value == pytest.approx(np.mean(best))
    assert [s.metric for s in scores.scores] == ["acc"]
    assert [(t.kind, t.items) for t in scores.tasks] == [("multiple choice", 3)]
    assert scores.tasks[0].chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_greedy_and_no_penalty_hides_a_repetition(
    batch_size: int, tokenizer: PreTrainedTokenizerFast, files: list[str]
) -> None:
    model = make_tiny("llama", vocab_size=len(VOCABULARY), max_position_embeddings=256)
    kept = model.generation_config
    kept.repetition_penalty = 50.0
    samples, read = asked(model, tokenizer, files[1], batch_size=batch_size)
    for i, row in enumerate(QUESTIONS):
        prompt = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
        assert read[i] == prompt
        ids = torch.tensor([prompt])
        tokens = continued(reading.read(wrap(model), ids), ids, STEPS)[0].tolist()
        tokens = tokens[: tokens.index(2)] if 2 in tokens else tokens
        assert samples[i]["resps"][0][0] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert model.generation_config is kept


def test_answers_are_scored_as_those_of_gsm8k(
    writer: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["I say\n#### 1000", "2,000 it is", "#### 3,000, or so 7", "go on, on, on, on, on,"]
    monkeypatch.setattr(harness.ProjectModel, "generate_until", lambda self, requests: (self.read.append([1]), told)[1])
    found = evaluate_tasks({"m": writer}, tokenizer, load_tasks(files[1:]))

    def value(metric: str) -> tuple[float, float]:
        score = found.score("m", "questions", metric)
        return score.value, score.error

    assert value("exact_match, strict-match") == pytest.approx((2 / 4, math.sqrt(1 / 12)))
    assert value("exact_match, flexible-extract") == pytest.approx((2 / 4, math.sqrt(1 / 12)))
    assert value("collapsed") == pytest.approx((1 / 4, 1 / 4))
    tokens = [tuple(tokenizer(text)["input_ids"]) for text in told]
    assert value("repeated 3-grams")[0] == pytest.approx(np.mean([repetition(t, 3) for t in tokens]))
    lengths = [len(t) for t in tokens]
    assert value("tokens") == pytest.approx((np.mean(lengths), np.std(lengths, ddof=1) / 2))
    assert math.isnan(found.tasks[0].chance)


def test_examples_come_first_and_are_not_scored(
    writer: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, files: list[str]
) -> None:
    samples, read = asked(writer, tokenizer, files[1], few_shot=2, limit=1)
    assert len(samples) == 1
    first, second, third = (f"Question: {row['question']}\nAnswer:" for row in QUESTIONS[:3])
    answers = [row["answer"] for row in QUESTIONS]
    assert tokenizer.decode(read[0]) == f"{first} {answers[0]}\n\n{second} {answers[1]}\n\n{third}"
    _, read = asked(writer, tokenizer, files[0], few_shot=1, limit=1)
    assert tokenizer.decode(read[0]) == "Which melts? ice\n\nTwo and two are\nfour"
    with pytest.raises(LyapunovPruneError, match="4 items, and 4"):
        load_tasks(files, few_shot=4)
    with pytest.raises(LyapunovPruneError, match="few_shot is -1"):
        load_tasks(files, few_shot=-1)


def test_models_stand_side_by_side_and_the_result_is_saved(
    writer: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, files: list[str], tmp_path: Path
) -> None:
    models = {"dense": writer, "pruned": remove_layers(writer, [2])}
    found = evaluate_tasks(models, tokenizer, load_tasks(files), limit=2)
    assert str(TaskScores.load(found.save(tmp_path / "tasks.json"))) == str(found)
    assert list(found.summary().columns) == ["task", "metric", "dense", "pruned"]
    assert len(found.to_frame()) == len(found.scores) == 2 * (2 + 5)
    assert all(s.value == pytest.approx(np.mean(s.items)) and len(s.items) == 2 for s in found.scores)
    assert [(t.name, t.kind, t.items) for t in found.tasks] == [
        ("choices", "multiple choice", 2),
        ("questions", "generation", 2),
    ]
    assert [on.model.num_layers for on in found.measured_on] == [6, 5]
    assert len({on.text_hash for on in found.measured_on}) == 1
    assert (
        found.measured_on[0].text_hash != evaluate_tasks(models, tokenizer, load_tasks(files)).measured_on[0].text_hash
    )
    drawn = {word.strip() for word in ElementTree.fromstring(tasks_figure(found)).itertext()}
    assert {"dense", "pruned", "guessing", "choices: acc_norm", "questions: collapsed"} <= drawn
    assert "questions: tokens" not in drawn


def test_no_score_is_certain_because_it_is_0_or_1(
    writer: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, files: list[str]
) -> None:
    z = 1.959964
    for value in (0.0, 1.0):
        low, high = _interval(TaskScore("m", "t", "acc", value, 0.0), 4)
        assert (low, high) == pytest.approx((value * 4 / (4 + z**2), 1 - (1 - value) * 4 / (4 + z**2)))
    assert _interval(TaskScore("m", "t", "repeated 3-grams", 0.5, 0.1), 4) == pytest.approx((0.304, 0.696))
    alone = evaluate_tasks({"m": writer}, tokenizer, load_tasks(files), limit=1)
    assert math.isnan(alone.score("m", "choices", "acc").error)
    assert "±" not in alone.summary().to_string()
    ElementTree.fromstring(tasks_figure(alone))


def test_nothing_else_is_touched_written_or_said(
    tokenizer: PreTrainedTokenizerFast, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model = make_tiny("llama", vocab_size=len(VOCABULARY), max_position_embeddings=256).train()
    unpadded = make_tokenizer(bos_token="<s>", eos_token="</s>")
    weights = copy.deepcopy(model.state_dict())
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    evaluate_tasks({"m": model}, unpadded, load_tasks(files))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert hooks_of(model) == 0
    assert unpadded.pad_token is None
    assert sorted(str(path) for path in tmp_path.iterdir()) == files
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_scored_is_refused(
    writer: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    llama: PreTrainedModel,
    files: list[str],
    tmp_path: Path,
) -> None:
    tasks = load_tasks(files)
    with pytest.raises(LyapunovPruneError, match="limit is 0"):
        evaluate_tasks({"m": writer}, tokenizer, tasks, limit=0)
    with pytest.raises(LyapunovPruneError, match="vocabulary of 97"):
        evaluate_tasks({"m": llama}, tokenizer, tasks)
    with pytest.raises(LyapunovPruneError, match="BOS token"):
        evaluate_tasks({"m": writer}, make_tokenizer(eos_token="</s>"), tasks, bos=True)
    with pytest.raises(LyapunovPruneError, match="end-of-text"):
        evaluate_tasks({"m": writer}, make_tokenizer(bos_token="<s>"), tasks[1:])
    long = write(tmp_path / "long.jsonl", [{"query": "x" * 250, "choices": ["y" * 9, "z"], "gold": 0}])
    with pytest.raises(LyapunovPruneError, match=r"260 tokens.*256"):
        evaluate_tasks({"m": writer}, tokenizer, load_tasks([long]))
    long = write(tmp_path / "long.jsonl", [*QUESTIONS, {"question": "x" * 230, "answer": "#### 1"}])
    with pytest.raises(LyapunovPruneError, match="248 tokens and 12"):
        evaluate_tasks({"m": writer}, tokenizer, load_tasks([long]))
    for task in tasks:
        broken: Any = copy.deepcopy(writer)
        with torch.no_grad():
            broken.model.layers[3].mlp.down_proj.weight[0, 0] = math.nan
        with pytest.raises(NonFiniteError, match="output of layer 3"):
            evaluate_tasks({"m": broken}, tokenizer, [task])
        assert hooks_of(broken) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no item"),
        ('{"question": "a", "answer": "1"}\n', "line 1 is no item"),
        ('{"question": "a", "answer": "#### 1"}\n\n{"question": "a"}\n', "line 3 is no item"),
        ('{"question": " ", "answer": "#### 1"}\n', "line 1 is no item"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}\n', "is no item"),
        ('{"context": "a"}\n', "line 1 is no item"),
        ('{"context_options": ["a", "b"], "gold": 0}\n', "line 1 is no item"),
        ('{"context_options": ["a", "a"], "continuation": "c", "gold": 0}\n', "line 1 is no item"),
        ('{"context_options": ["a", "b"], "continuation": "c", "gold": 2}\n', "is no item"),
        ("[1]\n", "line 1 is no item"),
    ],
)
def test_a_file_of_anything_else_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(LyapunovPruneError, match=message):
        load_tasks([tmp_path / "t.jsonl"])


def test_names_come_from_the_hub_or_say_what_to_do(
    writer: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(LyapunovPruneError, match=r"missing.jsonl"):
        load_tasks([tmp_path / "missing.jsonl"])
    with pytest.raises(LyapunovPruneError, match="names is"):
        load_tasks([])
    Path(tmp_path / "other").mkdir()
    with pytest.raises(LyapunovPruneError, match="called choices"):
        load_tasks([files[0], write(tmp_path / "other" / "choices.jsonl", QUESTIONS)])

    # One folder of the harness' tasks: it takes seconds to read all.
    arc = Path(lm_eval.__file__).parent / "tasks" / "arc"
    manager = harness_tasks.TaskManager(include_path=str(arc), include_defaults=False)
    monkeypatch.setattr(harness_tasks, "TaskManager", lambda: manager)
    with pytest.raises(LyapunovPruneError, match="nothing is neither"):
        load_tasks(["nothing"])

    def fails(*args: Any, **kwargs: Any) -> None:
        print("noise")
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(LyapunovPruneError, match=r"arc_easy .*no route"):
        load_tasks(["arc_easy"])
    rows = [
        {"question": f"{i}?", "choices": {"text": list("abcd"), "label": list("ABCD")}, "answerKey": "B"}
        for i in range(5)
    ]
    data = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list(rows)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    tasks = load_tasks(["arc_easy"], few_shot=2)
    found = evaluate_tasks({"a": writer, "b": writer}, tokenizer, tasks, limit=3)
    assert [(t.name, t.kind, t.items, t.few_shot, t.chance) for t in found.tasks] == [
        ("arc_easy", "multiple choice", 3, 2, 0.25)
    ]
    assert found.tasks[0].source == "lm-evaluation-harness"
    assert found.measured_on[0] == found.measured_on[1]  # the same examples, drawn with the same seed


# Halves, of which one chooses.


def test_every_second_item_is_held_out(files: list[str], tmp_path: Path) -> None:
    rows = [{"query": f"item {i}\u2028 is", "choices": ["a", "b"], "gold": i % 2} for i in range(11)]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    choose, held_out = halves(str(path))
    queries = [[doc["query"] for doc in task.harness.eval_docs] for task in (choose, held_out)]
    assert queries == [[f"item {i}\u2028 is " for i in range(k, 11, 2)] for k in (0, 1)]
    assert choose.name == held_out.name == "items"
    assert not choose.generates
    assert len(load_tasks([path])[0].harness.eval_docs) == 11


def named(monkeypatch: pytest.MonkeyPatch, **tasks: Any) -> None:
    monkeypatch.setattr(harness_tasks, "hub_tasks", lambda names, shots: tasks)


def test_halves_of_a_task_by_name(
    writer: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items are of the validation split, prepared, and its examples of another one."""
    rows = [{"q": f"{i}?", "gold": i % 2} for i in range(9)]
    config: dict[str, Any] = {
        "task": "named",
        "output_type": "multiple_choice",
        "custom_dataset": lambda **_: dict.fromkeys(("train", "validation"), datasets.Dataset.from_list(rows)),
        "fewshot_split": "train",
        "validation_split": "validation",
        "num_fewshot": 1,
        "process_docs": lambda docs: docs.map(lambda doc: {"query": f"is it {doc['q']}"}),
        "doc_to_text": "query",
        "doc_to_choice": ["no", "yes"],
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    named(monkeypatch, named=harness_tasks.ConfigurableTask(config=config))
    parts = halves("named")
    found = [evaluate_tasks({"a": writer}, tokenizer, [part]).tasks[0] for part in parts]
    assert [(task.items, task.few_shot) for task in found] == [(5, 1), (4, 1)]
    assert [doc["query"] for doc in parts[1].harness.eval_docs] == [f"is it {i}?" for i in (1, 3, 5, 7)]
    assert found[0].sha256 != found[1].sha256


def test_what_has_no_two_halves_of_scores_is_refused(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(files[0]).read_text(encoding="utf-8").splitlines(keepends=True)[:1] * 3))
    with pytest.raises(LyapunovPruneError, match=r"few.jsonl has 3 items; give 8"):
        halves(str(few))
    (task,) = load_tasks(files[:1])
    named(monkeypatch, one=task.harness, two=task.harness)
    with pytest.raises(LyapunovPruneError, match="group of 2 tasks"):
        halves("group")
    named(monkeypatch, one=task.harness)
    monkeypatch.setattr(harness_tasks.ConfigurableTask, "higher_is_better", lambda self: {"word_perplexity": False})
    monkeypatch.setattr(harness_tasks.ConfigurableTask, "eval_docs", [{}] * 8)
    with pytest.raises(LyapunovPruneError, match="word_perplexity, better when it is lower"):
        halves("one")


def test_without_the_extra_one_line_says_so(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lyapunov_prune.evaluation.harness")
    monkeypatch.delattr(lyapunov_prune.evaluation, "harness")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LyapunovPruneError, match=r"lyapunov-prune\[tasks\]"):
        load_tasks(files)


def called(capsys: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Mapping[str, Any]:
    monkeypatch.setattr(sys, "argv", ["lyapunov-prune", "eval", "tiny", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return {"code": end.value.code, "out": out, "err": err}


def test_eval_scores_tasks_of_both_models(
    checkpoint: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    shutil.copytree(checkpoint, "dense")
    common = ["--tokens", "64", "--context", "32", "--tasks", ",".join(files), "--limit", "2"]
    done = called(capsys, monkeypatch, "--against", "dense", *common)
    assert (done["code"], done["err"]) == (0, "")
    found = Evaluation.load("runs/tiny/eval.json").tasks
    assert found is not None
    assert "\n".join(found.answer()) in done["out"]
    for words in map(str.split, str(found).splitlines()):
        assert words in [line.split() for line in done["out"].splitlines()]
    page = Path("runs/tiny/report.html").read_text(encoding="utf-8")
    assert "<h2>Tasks</h2>" in page
    assert Path("runs/tiny/figures/tasks.svg").is_file()
    assert json.loads(Path("runs/tiny/eval.json").read_text())["tasks"]["limit"] == 2
    for options, message in (
        (["--limit", "2"], "give --tasks with it"),
        (["--tasks", "nothing.jsonl"], "nothing.jsonl is not there"),
    ):
        done = called(capsys, monkeypatch, *options)
        assert (done["code"], done["out"], done["err"].count("\n")) == (2, "", 1)
        assert message in done["err"]
