"""The result of healing, judged on text that was not used for training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.evaluation.judging import Comparison, Judgement, compare
from lyapunov_prune.evaluation.perplexity import Perplexity
from lyapunov_prune.healing.rounds import Round, best_of
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Reported, Result
from lyapunov_prune.results.wording import number
from lyapunov_prune.results.worth import Ratio

REPORT = "healing.json"  # next to the weights of a healed checkpoint


@dataclass(frozen=True)
class HeldOut:
    """Perplexity on the same held-out windows of the pruned, the healed and the dense model."""

    before: Perplexity
    after: Perplexity
    teacher: Perplexity


@dataclass(frozen=True)
class Healing(Result):
    """The result of healing.

    `losses` is the distillation loss before each step in nats per token, including trials; a step takes `per_step`
    windows. `rounds` are the judged stretches in order; `judged` is the mean loss of each judging window before
    training (nats per token). `kept` is the round whose weights were kept, −1 for the original weights. `rank` is None
    when all parameters of the layers were trained; `trained` is the number of trained parameters (layers or factors).
    `measured_on` is for the pruned model and the training text, `judged_on` for the judging windows. `decision` is of
    the original model and the best round, None if no round was better; it may rest on more windows than the rounds
    (`heal`). `held_out` is None without evaluation text. `narrow` says that products were in bfloat16; `change` is what
    that did to the first loss, relative to it (infinite if the models do not run so), None where it was not tried.
    """

    losses: np.ndarray
    rounds: tuple[Round, ...]
    judged: np.ndarray
    rank: int | None
    temperature: float
    trained: int
    teacher: ModelIdentity
    held_out: HeldOut | None
    measured_on: MeasuredOn
    judged_on: MeasuredOn
    per_step: int = 1
    decision: Judgement | None = None
    narrow: bool = False
    change: float | None = None

    def __post_init__(self) -> None:
        alike = all(each.judged.shape == self.judged.shape for each in self.rounds)
        require_fitting(alike, "rounds of healing were validated on different windows")
        steps = sum(each.stretch.steps for each in self.rounds)
        require_fitting(steps == len(self.losses), f"{steps} steps of healing have {len(self.losses)} losses")

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def best(self) -> int:
        """The round of least judged loss, −1 for the original model."""
        return best_of(self.rounds, self.judged)

    @property
    def gain(self) -> Comparison:
        """The best round compared with the original model on the windows that decided."""
        if self.decision is not None:
            return self.decision.comparison
        return compare(self.judged, self.judged if self.best < 0 else self.rounds[self.best].judged)

    @property
    def kept(self) -> int:
        """The round whose weights were kept: the best if it pays, otherwise −1 for the original model."""
        return self.best if self.gain.pays else -1

    @property
    def learning_rate(self) -> float:
        """The peak rate of the first round of the run, 0 if there were only trials."""
        return next((each.stretch.rate for each in self.rounds if not each.stretch.trial), 0.0)

    @property
    def recovered(self) -> float | None:
        """`(PPL_before − PPL_after) / (PPL_before − PPL_teacher)`: 1 for complete recovery.

        None without evaluation text, NaN if the removal did not raise the perplexity.
        """
        if self.held_out is None:
            return None
        before, after, teacher = (p.value for p in (self.held_out.before, self.held_out.after, self.held_out.teacher))
        return (before - after) / (before - teacher) if before > teacher else float("nan")

    def against_dense(self) -> Ratio | None:
        """None too if nothing was kept: that ratio is of no healed model."""
        return None if self.held_out is None or self.kept < 0 else self.held_out.after.ratio_to(self.held_out.teacher)

    def about(self) -> str:
        """The paragraph for the model card."""
        lost = self.recovered is not None and math.isfinite(self.recovered)
        recovered = f", which recovered {self.recovered:.0%} of the perplexity lost" if lost else ""
        headline = "\n".join(map(as_text, self.headline().splitlines()))
        return f"{headline}\n\n{self.steps} steps of distillation from {as_text(self.teacher.name)}{recovered}."

    def to_frame(self) -> pd.DataFrame:
        """One row for the original model and one per round, with the steps so far and the validation perplexity."""
        steps = np.cumsum([0, *(each.stretch.steps for each in self.rounds)])
        names = ["start", *map(self._name, range(len(self.rounds)))]
        with np.errstate(over="ignore"):
            judged = np.exp([self.judged.mean(), *(each.mean for each in self.rounds)])
        return pd.DataFrame(
            {
                "round": names,
                "steps": steps,
                "rate": [np.nan, *(each.stretch.rate for each in self.rounds)],
                "validation perplexity": judged,
                "kept": np.arange(-1, len(self.rounds)) == self.kept,
            }
        )

    def told(self) -> str:
        """One line: what was kept, and its effect on the windows that decided."""
        if self.kept < 0:
            return f"Nothing kept: no round beat the pruned model, {self.gain.told()}, used to choose"
        return f"Kept {self._name(self.kept)}: {self.gain.told()}, used to choose"

    def _name(self, number: int) -> str:
        """`trial 2` or `round 5`, each kind counted from 1."""
        trials = sum(each.stretch.trial for each in self.rounds)
        return f"trial {number + 1}" if number < trials else f"round {number - trials + 1}"

    def headline(self) -> str:
        lines = [self.told()]
        if self.held_out is not None:
            before, after, dense = (p.value for p in (self.held_out.before, self.held_out.after, self.held_out.teacher))
            back = "" if self.recovered is None or math.isnan(self.recovered) else f", {self.recovered:.0%} recovered"
            lines.append(f"Held-out perplexity {number(before)} → {number(after)}, dense {number(dense)}{back}")
        trained = "all parameters of the layers" if self.rank is None else f"updates of rank {self.rank}"
        windows = f", {self.per_step} windows a step" if self.per_step > 1 else ""
        products = ", products in bfloat16" if self.narrow else ""
        if self.change is not None and not self.narrow:
            products = ", products in float32, since bfloat16 changes the loss"
        lines.append(
            f"Healing by {trained} ({self.trained:,}), {self.steps} steps{windows}, learning rate "
            f"{self.learning_rate:.2g}, temperature {self.temperature:g}{products}"
        )
        lines.append(self.measured_on.line())
        if self.held_out is not None:
            lines.append(f"held out: {self.held_out.after.measured_on.line()}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Healed(Reported):
    """The healed model and the report; if `report.kept` is −1 the model is the unchanged pruned one."""

    model: PreTrainedModel
    report: Healing
