"""Remove layers, or their attention or MLP, in a given order until the prediction has moved as far as it may."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lyapunov_prune.arguments import Count, Positive
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.states import Change
from lyapunov_prune.forward.sublayers import named_branches, silent
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.predictions.divergence import divergences_of
from lyapunov_prune.profiles.contraction_profile import floor_note
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.counts import nothing_within, require_count
from lyapunov_prune.ranking.ranking import LayerRanking
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, Result

# Sets measured at once, sharing the dense logits; sets beyond the budget are wasted work.
_TOGETHER = 4


@dataclass(frozen=True)
class BudgetedRemoval(Result):
    """The first `n = 1, 2, …` layers of `ranking` removed together, up to the first `n` over `max_kl`.

    `kl` and `flipped` are (n,) float64 arrays of means over every position of a window but its last. With `p` the
    prediction of the dense model and `q` that of the pruned one, both at `temperature`, `kl = KL(p‖q)` in nats and
    `flipped` is the top-1 disagreement. The last row is over the budget unless everything that can be removed was: all
    layers but one, or every attention or MLP.
    """

    ranking: LayerRanking
    kl: np.ndarray
    flipped: np.ndarray
    max_kl: float
    temperature: float
    measured_on: MeasuredOn

    @property
    def predicted(self) -> np.ndarray | None:
        """The sum of the scores of the `n` layers, each measured alone, for criterion `kl`; None for others.

        It predicts `kl` but does not bound it: layers that are removed together change each other's inputs.
        """
        if self.ranking.criterion != "kl":
            return None
        return np.cumsum(self.ranking.scores[list(self.ranking.order)])[: len(self.kl)]

    @property
    def within(self) -> int:
        """The largest `n` before the first one over the budget."""
        return int(np.cumprod(self.kl <= self.max_kl).sum())

    def plan(self) -> PruningPlan:
        """The plan that removes them. Raises LyapunovPruneError when the first layer alone is over the budget."""
        if self.within == 0:
            part = {"layers": "layer", "mlp": "MLP"}.get(self.ranking.what, self.ranking.what)
            first = f"{'layer' if part == 'layer' else 'that of layer'} {self.ranking.order[0]}"
            raise nothing_within(part, f"a KL of {self.max_kl:g} nats a token", first, self.kl[0])
        plan = self.ranking.plan(self.within)
        known = self.measured_on.text_hash in {on.text_hash for on in plan.measured_on}
        return plan if known else replace(plan, measured_on=(*plan.measured_on, self.measured_on))

    def to_frame(self) -> pd.DataFrame:
        columns = {"removed": np.arange(1, len(self.kl) + 1), "layer": self.ranking.order[: len(self.kl)]}
        if self.predicted is not None:
            columns["predicted"] = self.predicted
        return pd.DataFrame({**columns, "kl": self.kl, "flipped": self.flipped, "within": self.kl <= self.max_kl})

    def brief(self) -> pd.DataFrame:
        """The last rows: those beside the budget."""
        return self.to_frame().tail(ROWS)

    @property
    def parts(self) -> str:
        """What is removed, in words."""
        return {"layers": "layers", "attention": "attentions", "mlp": "MLPs"}[self.ranking.what]

    def headline(self) -> str:
        return (
            f"{self.within} {self.parts} by {self.ranking.criterion} within {self.max_kl:g} nats a token, used to "
            f"choose, T = {self.temperature:g}{floor_note(self.ranking.below_floor)}\n{self.measured_on.line()}"
        )


@runs_model
def remove_under_budget(
    model: InMemory,
    batch: Readable,
    ranking: LayerRanking,
    max_kl: Positive,
    *,
    temperature: Positive = 1.0,
    batch_size: Count = 1,
) -> BudgetedRemoval:
    """Skip more and more of the first layers of `ranking` until `KL(p‖q)` on `batch` exceeds `max_kl`.

    Every forward starts at its first removed layer, from the dense state. Attentions and MLPs are silenced at their
    outputs; at least one whole layer stays. The model is untouched. A removal within the budget on `batch` may exceed
    it on other text.

    Raises NonFiniteError naming the layer when the dense model is not finite, and LyapunovPruneError when `max_kl` is
    not a number above 0, for a ranking of another model, whole layers of a model of one, weights of sublayers that are
    not in memory as plain matrices, a temperature that is not above 0, and logits that are not a function of the final
    state.
    """
    model.identity.require(ranking.model, "this ranking", "rank the layers of this model")
    reading = read(model, batch)
    most = len(ranking.order)
    if ranking.what == "layers":
        require_count(1, reading.structure.num_layers)
        most = min(reading.structure.num_layers - 1, most)
    changes = _removals(reading, ranking, most)
    costs = np.empty((0, 2))
    while len(costs) < most and (costs[:, 0] <= max_kl).all():
        counts = range(len(costs) + 1, min(len(costs) + _TOGETHER, most) + 1)
        description = f"removing {counts[0]} to {counts[-1]} {ranking.what}"
        some = [changes[n - 1] for n in counts]
        means = divergences_of(reading, some, temperature, batch_size, description)
        costs = np.concatenate([costs, means[:, [1, 3]]])
    over = np.flatnonzero(~(costs[:, 0] <= max_kl))  # NaN counts as over any budget
    kl, flipped = costs[: over[0] + 1 if len(over) else None].T.copy()
    return BudgetedRemoval(ranking, kl, flipped, float(max_kl), float(temperature), reading.measured_on())


def _removals(reading: Reading, ranking: LayerRanking, most: int) -> list[Change]:
    """The removals of the first 1, 2, …, `most` layers of the ranking."""
    sets = [ranking.order[:n] for n in range(1, most + 1)]
    if ranking.what == "layers":
        return [(min(gone), partial(reading.prefix.without, gone)) for gone in sets]
    attention, mlp = (ranking.order if ranking.what == kind else () for kind in ("attention", "mlp"))
    branches = {i: branch for i, _, branch in named_branches(reading.sublayers, attention, mlp)}
    return [(min(gone), partial(silent, *(branches[i] for i in gone))) for gone in sets]
