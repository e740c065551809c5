"""Zero-shot multiple choice and generation tasks, scored by lm-evaluation-harness, for several models."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from scipy import stats
from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import SOME, Count, Range, checked
from lyapunov_prune.data.batch import rows_measured_on
from lyapunov_prune.data.choices import read_task
from lyapunov_prune.data.text import begins_with_bos
from lyapunov_prune.data.unseen import require_unseen_items, strings_of
from lyapunov_prune.errors import LyapunovPruneError, first_of, require_extra
from lyapunov_prune.evaluation.judging import POWER
from lyapunov_prune.evaluation.repetition import collapsed, repetition
from lyapunov_prune.evaluation.task_scores import COLLAPSED, LENGTH, REPEATED, ScoredTask, TaskScore, TaskScores
from lyapunov_prune.models.decoder import Model, model_of
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.results.result import MeasuredOn


@dataclass(frozen=True)
class Task:
    """A task to evaluate.

    `harness` is the task object of the harness; `sha256` is the digest of the file, None for a task by name.
    """

    name: str
    source: str
    sha256: str | None
    harness: Any

    @property
    def generates(self) -> bool:
        """Whether the model writes its answers instead of choosing among given ones."""
        return self.harness.OUTPUT_TYPE == "generate_until"


@checked
def load_tasks(
    names: Annotated[Sequence[str | Path], SOME], *, few_shot: Annotated[int, Range(0)] | None = None
) -> tuple[Task, ...]:
    """Load tasks from `.jsonl` files, and from the hub by their names in lm-evaluation-harness (extra `tasks`).

    A file of `{"query", "choices", "gold"}` lines is multiple choice: a choice follows its query after one space, or
    directly where the query ends in white space (which the harness scores as part of every choice). A file of
    `{"context_options", "continuation", "gold"}` lines, the form of WinoGrande, scores the continuation, after a space,
    following each beginning. A file of `{"question", "answer"}` lines is generation, scored like the harness' gsm8k.
    The first `few_shot` items of a file (default: none) are examples; tasks by name have their own default.

    Raises LyapunovPruneError for a missing extra, a file of another form, two tasks of one name, an unknown name, and a
    failed download.
    """
    files = [str(name) for name in names if Path(name).suffix == ".jsonl"]
    hub = [str(name) for name in names if str(name) not in files]
    read = {name: read_task(name) for name in files}
    require_extra("lm_eval", "tasks", "scoring tasks")
    from lyapunov_prune.evaluation.harness_tasks import hub_tasks, local_task

    tasks = [Task(file.path.stem, name, file.sha256, local_task(file, few_shot or 0)) for name, file in read.items()]
    if hub:
        loaded = hub_tasks(hub, few_shot)
        tasks += [Task(name, "lm-evaluation-harness", None, task) for name, task in loaded.items()]
    known = [task.name for task in tasks]
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise LyapunovPruneError(f"two tasks are called {twice}; rename a file")
    return tuple(tasks)


@checked
def halves(source: str) -> tuple[Task, Task]:
    """Split a task into alternate items: one half to choose how much of a model to remove, the other held out.

    `source` is a `.jsonl` file or a name, as for `load_tasks`. Raises the errors of `load_tasks`, and
    LyapunovPruneError for a group of several tasks, for too few items, and for a task whose first metric is better when
    it is lower.
    """
    tasks = load_tasks([source])
    task = tasks[0]
    from lyapunov_prune.evaluation.harness_tasks import every_second

    items = len(task.harness.eval_docs)
    metric, higher = next(iter(task.harness.higher_is_better().items()))
    wrong = {
        f"is a group of {len(tasks)} tasks; give one of them, as {task.name}": len(tasks) > 1,
        f"has {items} items; give {2 * POWER} or more, half of them choose": items < 2 * POWER,
        f"is scored by {metric}, better when it is lower; give a task with a score": not higher,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"{source} {why}")
    choose, held_out = (
        replace(task, source=f"{task.source}, {part}", sha256=None, harness=every_second(task.harness, first))
        for first, part in enumerate(("choose", "held out"))
    )
    return choose, held_out


@checked
def evaluate_tasks(
    models: Mapping[str, Model],
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    *,
    limit: Count | None = None,
    bos: bool | None = None,
    batch_size: Count = 1,
) -> TaskScores:
    """Score every model on the first `limit` items (default: all) of every task with the harness, see TaskScores.

    `bos` puts a BOS token before every text; None follows the tokenizer's default. Answers are decoded greedily, at
    most 256 tokens for tasks from files; penalties of the generation config are not applied. Log-likelihoods are those
    of the harness, in the model's dtype; for tasks from files they equal those of `compare_choices` up to one constant
    per item, from the tokens that its choices share. The models and the random states are restored.

    Raises NonFiniteError naming the layer when logits are not finite, and LyapunovPruneError for a limit below 1, items
    that a recorded step of a model has seen, an item that does not fit the context (nothing is truncated), and ids
    outside the vocabulary.
    """
    given = {name: model_of(model) for name, model in models.items()}
    from lyapunov_prune.evaluation import harness
    from lyapunov_prune.evaluation.harness_tasks import SEED

    bos = begins_with_bos(tokenizer, bos)
    objects = {task.name: task.harness for task in tasks}
    for task in tasks:
        items = [tuple(strings_of(item)) for item in islice(task.harness.eval_docs, limit)]
        for model in given.values():
            require_unseen_items(model, tokenizer, items, task.source if task.sha256 else task.name)
    scores: list[TaskScore] = []
    scored: list[ScoredTask] = []
    measured: list[MeasuredOn] = []
    for name, model in given.items():
        harness_results, read = harness.run(model, tokenizer, objects, limit=limit, bos=bos, batch_size=batch_size)
        for task in tasks:
            scores += _scores(name, task.name, harness_results, tokenizer)
        scored = scored or [_scored(task, harness_results) for task in tasks]
        names = ", ".join(task.name for task in tasks)
        measured.append(rows_measured_on(model, read, names, bos=bos, seed=SEED, packages=["lm-eval", "datasets"]))
    return TaskScores(tuple(given), tuple(scored), tuple(scores), limit, tuple(measured))


def _scores(
    model: str, task: str, harness_results: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> list[TaskScore]:
    """The metrics of the harness in its order, then those of the generated answers."""
    results, samples = harness_results["results"][task], harness_results["samples"][task]
    rows = []
    for key, value in results.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = results.get(f"{metric}_stderr,{chosen}", math.nan)
        label = metric if chosen == "none" else f"{metric}, {chosen}"
        told = {s["doc_id"]: s[metric] for s in samples if s["filter"] == chosen and metric in s}
        numbers = all(isinstance(each, bool | int | float | np.number) for each in told.values())
        items = tuple(float(told[i]) for i in sorted(told)) if numbers else ()
        rows.append(TaskScore(model, task, label, float(value), error if isinstance(error, float) else math.nan, items))
    if harness_results["configs"][task]["output_type"] == "generate_until":
        answers = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}.values()
        tokens = [tuple(token_ids(tokenizer, text)) for text in answers]
        for label, values in (
            (COLLAPSED, [float(collapsed(text)) for text in tokens]),
            (REPEATED, [repetition(text, 3) for text in tokens]),
            (LENGTH, [float(len(text)) for text in tokens]),
        ):
            error = float(stats.sem(values)) if len(values) > 1 else math.nan
            rows.append(TaskScore(model, task, label, float(np.mean(values)), error, tuple(values)))
    return rows


def _scored(task: Task, harness_results: Mapping[str, Any]) -> ScoredTask:
    output, samples = harness_results["configs"][task.name]["output_type"], harness_results["samples"][task.name]
    items = {sample["doc_id"]: sample for sample in samples}
    chance = math.nan
    if output == "multiple_choice":
        chance = float(np.mean([1 / len(task.harness.doc_to_choice(sample["doc"])) for sample in items.values()]))
    digest = hashlib.sha256("".join(sample["doc_hash"] for sample in items.values()).encode()).hexdigest()
    return ScoredTask(
        name=task.name,
        kind={"multiple_choice": "multiple choice", "generate_until": "generation"}.get(output, output),
        source=task.source,
        sha256=task.sha256 or digest,
        items=len(items),
        few_shot=int(harness_results["n-shot"][task.name] or 0),
        chance=chance,
    )
