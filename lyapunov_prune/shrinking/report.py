"""The report of shrinking: what each step did, and how the smaller model compares with the dense one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from lyapunov_prune.errors import printable
from lyapunov_prune.evaluation.evaluation import Evaluation
from lyapunov_prune.evaluation.perplexity import Perplexity
from lyapunov_prune.evaluation.sizes import SizesTried
from lyapunov_prune.evaluation.task_scores import TaskScore
from lyapunov_prune.models.size import Size
from lyapunov_prune.pruning.alone import RoundedAlone
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Reported, Result
from lyapunov_prune.results.wording import between, number
from lyapunov_prune.results.worth import Ratio

REPORT = "shrink.json"  # the file's name beside the weights


@dataclass(frozen=True)
class Taken:
    """One step: whether its result was `kept`, the verdict of the text that judged it, and the seconds that it took."""

    name: str
    kept: bool
    told: str
    seconds: float


@dataclass(frozen=True)
class Shrinking(Result):
    """How a model was shrunk to a `target`, and the dense and the smaller model side by side.

    `steps` holds every step in order, including dropped and skipped ones. `size` is the bytes of all weights of the
    dense and the smaller model. `evaluation` compares both models on text that no step learnt from or was judged by,
    `foreign` on another kind of text than any step has read (dense, smaller; empty if there was none at hand).
    `learnt_on` is the text that healed, `judged_on` the second text that judges mending. `commands` do the same by
    hand. `loader` is the transformers class that loads the result. `folder` is where it was written, None if it was
    not. `tried` are the numbers of layers of which this one was taken, where no target was given. `alone` is the dense
    model rounded to the same bytes.
    """

    target: str
    plan: PruningPlan
    steps: tuple[Taken, ...]
    size: tuple[int, int]
    evaluation: Evaluation
    foreign: tuple[Perplexity, ...]
    learnt_on: MeasuredOn
    judged_on: MeasuredOn
    commands: tuple[str, ...]
    loader: str
    folder: str | None = None
    tried: SizesTried | None = None
    alone: RoundedAlone | None = None

    def __post_init__(self) -> None:
        pairs = {len(self.evaluation.perplexities), len(self.foreign) or 2}
        require_fitting(pairs == {2}, "shrinking compares the dense and the smaller model")

    @property
    def measured_on(self) -> tuple[MeasuredOn, ...]:
        return self.evaluation.measured_on

    @property
    def parameters(self) -> tuple[int, int]:
        dense, smaller = (p.measured_on.model.parameters for p in self.evaluation.perplexities)
        return dense, smaller

    def to_frame(self) -> pd.DataFrame:
        """A row a step."""
        return pd.DataFrame(
            [(s.name, s.kept, s.told, s.seconds) for s in self.steps], columns=["step", "kept", "told", "seconds"]
        )

    def headline(self) -> str:
        return self.measured_on[1].line()

    def answer(self) -> list[str]:
        """What is left, its speed and quality, what was dropped, what rounding alone loses, and how to load it."""
        (before, after), (large, small) = self.parameters, self.size
        lines = [
            f"{self.plan.model.name} without {self._gone()}: {before:,} → {after:,} parameters, "
            f"{Size(large, before).told()} → {Size(small, after).told()}",
            self.speed(),
            ". ".join([*self.worth(), *self._tasks()]),
            f"{self._kept()}. {self.read()}",
            self.alone.told() if self.alone is not None else "",
        ]
        if self.folder is not None and not self.folder.endswith(".gguf"):
            lines += [
                f"With transformers: from transformers import AutoTokenizer, {self.loader}",
                f"  model = {self.loader}.from_pretrained({self.folder!r})",
                f"  tokenizer = AutoTokenizer.from_pretrained({self.folder!r})",
            ]
        return [printable(line) for line in lines if line]

    def further(self) -> list[Result]:
        return [] if self.tried is None else [self.tried]

    def against_dense(self) -> Ratio | None:
        return self.evaluation.against_dense()

    def _gone(self) -> str:
        remove = self.plan.remove
        return f"{len(remove)} of {self.plan.model.num_layers} layers ({', '.join(map(str, remove))})"

    def speed(self) -> str:
        """Of both models, in a sentence; empty if it was not measured."""
        speed = self.evaluation.speed
        if speed is None:
            return ""
        dense, smaller = speed.rows
        return (
            f"Speed of the dense model: {number(dense.prefill)} tokens/s read, {number(dense.decode)} written. Of the "
            f"smaller one: reading {smaller.told('prefill')}; writing {smaller.told('decode')}"
        )

    def worth(self) -> list[str]:
        """The perplexities on the text of `evaluation`, and on the foreign one."""
        text, why = self.evaluation.measured_on[0].text, "that no step has seen"
        if text in (self.learnt_on.text, self.judged_on.text):
            step = "learnt from" if text == self.learnt_on.text else "was validated on"
            why = f"that no step has seen, of the kind that it {step}"
        found = [_ratio(self.evaluation.perplexities, why)]
        if self.foreign:
            found.append(_ratio(self.foreign, "of a kind that no step has seen"))
        return found

    def read(self) -> str:
        """The text to learn from, and those to judge by."""
        learnt, judged = (f"{on.text} ({on.split})" for on in (self.learnt_on, self.judged_on))
        return f"Learnt from {learnt}; validated on other windows of it, and {judged}"

    def _tasks(self) -> list[str]:
        scores = self.evaluation.tasks
        if scores is None:
            return []
        told = []
        for task in scores.tasks:
            dense, smaller = (main_score([s for s in scores.scores if (s.model, s.task) == (m, task.name)])
                              for m in scores.models)  # fmt: skip
            told.append(f"{task.name} {_score(dense)} → {_score(smaller)} ({dense.metric}, {task.items} items)")
        return told

    def _kept(self) -> str:
        kept = [step.name for step in self.steps if step.kept]
        dropped = [step.name for step in self.steps if not step.kept]
        why = f"; dropped: {', '.join(dropped)} (the table says why)" if dropped else "; nothing dropped"
        return f"Kept: {', '.join(kept)}{why}"


@dataclass(frozen=True, repr=False)
class Shrunk(Reported):
    """The smaller model and the report."""

    model: PreTrainedModel
    report: Shrinking


def main_score(scores: list[TaskScore]) -> TaskScore:
    """The main score of a task: the exact match of the last number if there is one, else the harness's first score."""
    flexible = [s for s in scores if s.metric.endswith("flexible-extract")]
    return (flexible or scores)[0]


def _ratio(pair: Sequence[Perplexity], why: str) -> str:
    dense, smaller = pair
    on, ratio = smaller.measured_on, smaller.ratio_to(dense)
    told = f"{number(dense.value)} → {number(smaller.value)} (× {ratio.value:.4g}, {between(*ratio[1:], 4)})"
    return f"Perplexity {told} on {on.tokens:,} tokens of {on.text} {why}"


def _score(score: TaskScore) -> str:
    return f"{score.value:.3g}" + (f" ± {1.96 * score.error:.2g}" if math.isfinite(score.error) else "")
