"""The scores of several models on the same tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lyapunov_prune.results.frames import columns, pd
from lyapunov_prune.results.result import LINES, MeasuredOn, Result

# Metrics of generated answers, in addition to those of the harness.
COLLAPSED, REPEATED, LENGTH = "collapsed", "repeated 3-grams", "tokens"


@dataclass(frozen=True)
class ScoredTask:
    """A scored task. `sha256` is of the file, or of the scored items for a task by name.

    `chance` is the accuracy of guessing, the mean of `1 / choices`; NaN unless multiple choice. `few_shot` examples
    precede each of the `items`.
    """

    name: str
    kind: str  # multiple choice, generation, or what the harness calls another output type
    source: str  # the file, or lm-evaluation-harness
    sha256: str
    items: int
    few_shot: int
    chance: float


@dataclass(frozen=True)
class TaskScore:
    """`value` of a metric and its standard error over items (NaN if it has none).

    `items` holds the metric of every item in order, for paired comparisons; empty if the harness has none.
    """

    model: str
    task: str
    metric: str
    value: float
    error: float
    items: tuple[float, ...] = ()


@dataclass(frozen=True)
class TaskScores(Result):
    """Scores of one or more models on the same items; `measured_on` is in the order of `models`.

    Metrics are those of the harness, followed by a comma and the name of the filter if there is one: `acc`, `acc_norm`
    (by log-likelihood per character); `exact_match, strict-match` (the number after `####`) and
    `exact_match, flexible-extract` (the last number). Generation tasks also have, computed from the re-tokenized
    answers, `collapsed`, the share that ends in a cycle (`repetition.collapsed`), `repeated 3-grams`, the mean share of
    repeated 3-grams (`repetition.repetition`), and `tokens`, the mean length.
    """

    models: tuple[str, ...]
    tasks: tuple[ScoredTask, ...]
    scores: tuple[TaskScore, ...]
    limit: int | None
    measured_on: tuple[MeasuredOn, ...]

    def score(self, model: str, task: str, metric: str) -> TaskScore:
        return next(s for s in self.scores if (s.model, s.task, s.metric) == (model, task, metric))

    def to_frame(self) -> pd.DataFrame:
        """One row per model, task and metric."""
        tasks, rows = {task.name: task for task in self.tasks}, []
        for s in self.scores:
            task = tasks[s.task]
            row = {"task": s.task, "kind": task.kind, **columns(s, "metric", "model", "value", "error")}
            row |= columns(task, "items", "few_shot")
            chance = task.chance if s.metric.startswith("acc") else math.nan
            rows.append({**row, "chance": chance, "sha256": task.sha256[:12]})
        return pd.DataFrame(rows)

    def summary(self) -> pd.DataFrame:
        """One row per task and metric, with the models side by side: value ± standard error."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for s in self.scores:
            row = rows.setdefault((s.task, s.metric), {"task": s.task, "metric": s.metric})
            row[s.model] = f"{s.value:.4g}" + (f" ± {s.error:.2g}" if math.isfinite(s.error) else "")
        return pd.DataFrame(list(rows.values()))

    def answer(self) -> list[str]:
        """One line per task with its first metric. Generation comes first: it loses more than multiple choice shows."""
        lines = []
        for task in sorted(self.tasks, key=lambda task: task.kind != "generation"):
            metric = next(s.metric for s in self.scores if s.task == task.name)
            scores = [self.score(model, task.name, metric) for model in self.models]
            chance = f", guessing {task.chance:.3g}" if math.isfinite(task.chance) and metric.startswith("acc") else ""
            told = " → ".join(f"{s.value:.3g} ± {1.96 * s.error:.2g}" for s in scores)
            lines.append(f"{task.name} ({metric}, {task.items} items{chance}): {told}.")
        return lines[:LINES]

    def headline(self) -> str:
        on = self.measured_on[0]
        sizes = ", ".join(
            f"{t.name} {t.items}" + (f" ({t.few_shot} shots)" if t.few_shot else "")
            + (f", chance {t.chance:.3g}" if math.isfinite(t.chance) else "")
            for t in self.tasks
        )  # fmt: skip
        return f"Tasks, lm-eval {on.versions['lm-eval']}, value ± standard error; items: {sizes}\n{on.line()}"
