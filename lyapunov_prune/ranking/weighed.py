"""Compare plans for one model: how many parameters each leaves, and how far it moves the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lyapunov_prune.evaluation.judging import chance
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.pruning.counting import held_by, shares_leaving
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.surgery import Operation
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class WeighedPlans(Result):
    """`plans` for one model, what each leaves and costs, and which of them is `chosen` for the `aim`.

    `kl[n, w]` is KL(p‖q) in nats, the mean over every position but the last of window w, where `p` is the prediction of
    the dense model and `q` that of the model without plan n's parts. These windows did not choose the parts.
    Nothing is mended or refitted. `left[n]` is the number of parameters that stay.
    """

    aim: str
    plans: tuple[PruningPlan, ...]
    kl: np.ndarray
    left: tuple[int, ...]
    chosen: int
    measured_on: MeasuredOn

    def __post_init__(self) -> None:
        counts = {len(self.plans), len(self.kl), len(self.left)}
        fits = len(counts) == 1 and self.kl.ndim == 2 and 0 <= self.chosen < len(self.plans)
        require_fitting(fits, "the plans and what was measured of them are not as many")

    def plan(self) -> PruningPlan:
        """The chosen plan; its history includes the text that chose among the plans."""
        return self.plans[self.chosen].seen_on(self.measured_on)

    def to_frame(self) -> pd.DataFrame:
        """One row a plan; `p` is the probability that chance alone favours the chosen plan this much."""
        return pd.DataFrame(
            {
                "layers": [len(plan.remove) for plan in self.plans],
                "channels": [plan.channels_gone for plan in self.plans],
                "experts": [max(map(len, plan.experts), default=0) for plan in self.plans],
                "left": self.left,
                "kl": self.kl.mean(1),
                "p": [np.nan if n == self.chosen else chance(kl, self.kl[self.chosen]) for n, kl in enumerate(self.kl)],
                "chosen": np.arange(len(self.plans)) == self.chosen,
            }
        )

    def headline(self) -> str:
        return f"{len(self.plans)} ways to {self.aim}\n{self.measured_on.line()}"

    def answer(self) -> list[str]:
        lines = [f"{self.plans[self.chosen].sentence()}: {self._cost(self.chosen)}, of {len(self.plans)} ways tried."]
        for n, plan in enumerate(self.plans):
            alone = not (plan.remove and plan.drops_parts)
            if alone and n != self.chosen and any(p.remove for p in self.plans):
                lines.append(f"{'Layers' if plan.remove else 'Channels or experts'} alone: {self._cost(n)}.")
        return [*lines, self.measured_on.line()]

    def _cost(self, n: int) -> str:
        return f"KL {self.kl[n].mean():.4g} nats a token, {self.left[n]:,} parameters left"


@in_eval_mode
def costs_of(reading: Reading, operations: Sequence[Operation]) -> np.ndarray:
    """KL(p‖q) in nats between the dense model and each changed one, (operations × windows), as in `WeighedPlans.kl`."""
    changes = [
        (min(operation.plan.touched), partial(operation.standing_in, reading.decoder)) for operation in operations
    ]
    windows = []
    for window in range(len(reading.batch)):
        one = replace(reading, batch=reading.batch.take([window]))
        windows.append(divergences_of(one, changes, 1.0, 1, f"window {window + 1} of {len(reading.batch)}")[:, 1])
    return np.array(windows).T


def leaving(reading: Reading, plan: PruningPlan) -> int:
    """How many parameters `plan` removes."""
    return held_by(reading.model, (), shares_leaving(reading.decoder, plan))[0]
