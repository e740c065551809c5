"""The result of a joint removal: the decision, the data behind it, and the score of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.evaluation.judging import Comparison
from lyapunov_prune.evaluation.perplexity import ratio_of
from lyapunov_prune.joint.decision import JointDecision
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.joint.map import JointMap
from lyapunov_prune.joint.points import Points
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, MeasuredOn, Result
from lyapunov_prune.results.worth import Ratio

REPORT, PLAN = "joint.json", "plan.json"  # beside the weights


@dataclass(frozen=True)
class JointRun(Result):
    """A joint removal and the data behind it.

    `dense` and `chosen` are scores on the final slice, which was not used before; `error` is the standard error of
    their difference, paired by item, and `rise` (windows,) by how much the loss of every window rises, nats a token
    (None for images, and in old results). `start` is the point whose weights the final recovery started from, `losses`
    the distillation loss before each of its steps. `gain` compares before and after these steps on the selection slice:
    if it does not pay, the weights are those of the start (None in old results). `parameters` and `size` (bytes) are
    before and after; `seconds` is the time of each part of the run that finished (for points, including earlier runs).
    """

    importance: Importance
    points: Points
    map: JointMap
    decision: JointDecision
    plan: PruningPlan
    start: tuple[int, int]
    losses: np.ndarray
    dense: float
    chosen: float
    error: float
    parameters: tuple[int, int]
    size: tuple[int, int]
    seconds: dict[str, float]
    measured_on: MeasuredOn
    gain: Comparison | None = None
    rise: np.ndarray | None = None

    def against_dense(self) -> Ratio | None:
        return None if self.rise is None else ratio_of(self.rise)

    def to_frame(self) -> pd.DataFrame:
        """Seconds of each part of the run."""
        parts = {**self.seconds, "together": sum(self.seconds.values())}
        return pd.DataFrame({"part": list(parts), "seconds": list(parts.values())})

    def _kept(self) -> str:
        if self.gain is None:
            return ""
        kept = "kept" if self.gain.pays else "not kept, the weights are those of its start"
        return f"The final recovery is {kept}: {self.gain.told()} to select by\n"

    def answer(self) -> list[str]:
        score = "top-1 accuracy" if self.measured_on.images else "−loss in nats a token"
        attention, activation = self.decision.chosen
        others = int(self.decision.within.sum()) - 1
        sure = "certain under the measured noise" if self.decision.certain else f"others within noise: {others}"
        before, after = self.parameters
        return [
            f"Removed {attention} attentions and {activation} activations of {self.decision.layers} layers ({sure}).",
            f"{score}: {self.dense:.4g} → {self.chosen:.4g}, standard error of the difference {self.error:.2g}, on "
            "data that nothing before has seen.",
            f"{after:,} parameters of {before:,} ({after / before:.1%}), {self.size[1]:,} bytes of {self.size[0]:,}.",
            *self._kept().splitlines(),
            self.measured_on.line(),
        ][:LINES]

    def headline(self) -> str:
        score = "top-1 accuracy" if self.measured_on.images else "−loss in nats per token"
        return (
            f"{self.decision.headline()}\n{self.plan.sentence()}\n{self._kept()}"
            f"After {len(self.losses)} more steps {score} {self.chosen:.4g} on the final slice (dense "
            f"{self.dense:.4g}; standard error of the difference {self.error:.2g}); {self.parameters[1]:,} of "
            f"{self.parameters[0]:,} parameters, {self.size[1]:,} bytes of {self.size[0]:,}\n{self.measured_on.line()}"
        )
