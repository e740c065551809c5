"""Scores of layers or of their sublayers, the order they give, and the plan that follows."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lyapunov_prune.arguments import Amount, Count, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.contraction_profile import floor_note
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import LayersGone, PartsGone
from lyapunov_prune.ranking.counts import count_of, protected_layers, require_count
from lyapunov_prune.ranking.stability import tied
from lyapunov_prune.results.arrays import require_fitting
from lyapunov_prune.results.axes import LayerNumbers, Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result
from lyapunov_prune.results.wording import bars, layers_of, ranges

FIRM = 0.9  # selection frequency above which a place in the ranking is called firm


class Ranking(Result):
    """The result of every criterion: it knows `what` it ranks (layers, or their attention or MLP) and makes plans."""

    criterion: str
    what: str

    @abstractmethod
    def plan(self, remove: Amount) -> PruningPlan:
        """The plan that removes `what` from `remove` layers, a number or a share.

        Raises LyapunovPruneError if there are fewer to remove.
        """


_LARGEST = np.finfo(np.float64).max  # scores may be NaN, never infinite


@dataclass(frozen=True)
class LayerRanking(Ranking):
    """A score for every layer, (L,) float64; the smallest is removed first.

    `what` is removed: whole layers, or their attention or MLP alone. Layers that lack it have no score (NaN). If the
    scores rest on ρ, `below_floor` holds the layers whose ρ is rounding (`ContractionProfile.below_floor`). `protected`
    layers stay and have no score either. `picked[n − 1, l]` (L, L) is the selection frequency: how often layer l is
    among the first n in bootstrap draws of the windows and of the seeds of ρ. It is None if the scores rest on one
    window or none.
    """

    criterion: str
    alpha: float | None
    scores: Annotated[np.ndarray, Per("layer", least=-_LARGEST, most=_LARGEST, finite=False)]
    model: ModelIdentity
    measured_on: tuple[MeasuredOn, ...]
    what: str = "layers"
    below_floor: LayerNumbers = ()
    protected: LayerNumbers = ()
    picked: Annotated[np.ndarray | None, Per("layer", "layer", most=1.0)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.what != "layers" or set(np.flatnonzero(np.isnan(self.scores))) == set(self.protected)
        require_fitting(fits, "ranking, scores: those of the protected layers alone are missing")

    @property
    def order(self) -> tuple[int, ...]:
        """The layers in the order of removal; equal scores keep the order of the model."""
        return tuple(int(i) for i in np.argsort(self.scores, kind="stable") if not np.isnan(self.scores[i]))

    @checked
    def plan(self, remove: Amount, period: Count = 1) -> PruningPlan:
        """The plan that removes `what` from the `remove` layers of smallest score.

        With a `period`, layers are removed by whole periods, aligned with the first layer, in the order of the sum of
        their scores. Raises LyapunovPruneError for MLPs, which no checkpoint lacks alone, for a period below 1, and if
        `remove` is below one, too large, no whole number of periods or leaves no layer.
        """
        if self.what == "mlp":
            raise LyapunovPruneError("no checkpoint lacks MLPs alone; remove whole layers")
        remove = count_of(remove, len(self.scores))
        if period == 1:
            require_count(remove, len(self.scores), self.what, None if self.what == "layers" else len(self.order))
        protected_layers(len(self.scores), self.protected, remove)
        whole = period > 1  # no selection frequency of whole periods
        first = self._periods(remove, period) if whole else self.order[:remove]
        return PruningPlan(
            gone=LayersGone(first) if self.what == "layers" else PartsGone((), first),
            criterion=self.criterion,
            alpha=self.alpha,
            scores=self.scores,
            model=self.model,
            measured_on=self.measured_on,
            below_floor=self.below_floor,
            picked=None if whole or self.picked is None else self.picked[remove - 1],
            tied=() if whole else tied(self.scores, self.order, remove),
        )

    def _periods(self, remove: int, period: int) -> tuple[int, ...]:
        require_periods(remove, len(self.scores), period)
        whole = len(self.scores) // period  # a remainder at the end is no whole period and stays
        sums = self.scores[: whole * period].reshape(whole, period).sum(1)
        chosen = np.argsort(sums, kind="stable")[: remove // period]
        if np.isnan(sums[chosen]).any():
            raise LyapunovPruneError(f"no {remove // period} periods are without a protected layer; protect fewer")
        return tuple(int(p) * period + i for p in chosen for i in range(period))

    def to_frame(self) -> pd.DataFrame:
        """One row a layer in the order of removal; `this_early` is how often bootstrap draws rank it this early."""
        order = list(self.order)
        frame = pd.DataFrame({"rank": range(1, len(order) + 1), "layer": order, "score": self.scores[order]})
        if self.picked is not None:
            frame["this_early"] = [self.picked[place, layer] for place, layer in enumerate(order)]
        if self.below_floor:
            frame["below_floor"] = np.isin(order, self.below_floor)
        return frame

    def headline(self) -> str:
        blend = f" (alpha {self.alpha:g})" if self.alpha is not None else ""
        subject = {"layers": "Layers", "attention": "Attention of the layers", "mlp": "MLPs of the layers"}[self.what]
        note = floor_note(self.below_floor)
        return f"{subject} of {self.model.name} by {self.criterion}{blend}, first to remove first{note}"

    def answer(self) -> list[str]:
        layers, some = len(self.scores), self.order[: max(1, len(self.scores) // 4)]
        part = {"layers": "", "attention": "the attention of ", "mlp": "the MLP of "}[self.what]
        named = f"{part}layer{'s' * (len(some) > 1)} {', '.join(map(str, some))}"
        lines = [
            f"First to go by {self.criterion}: {named} ({'in this order, ' * (len(some) > 1)}of {layers})"
            f"{floor_note(self.below_floor)}.",
            f"Score by layer, lowest removed first: {bars(self.scores)}",
        ]
        if self.protected:
            lines.append(f"Protected, and not ranked: {layers_of(self.protected)}.")
        if self.picked is not None:
            often = self.picked[len(some) - 1]
            firm = [i for i in some if often[i] >= FIRM]
            shaky = [i for i in some if often[i] < FIRM]
            lines.append(
                f"{f'Among the first {len(some)}' if len(some) > 1 else 'First'} in {FIRM:.0%} or more of redrawn "
                f"windows: {ranges(firm)}"
                + (f"; less often: {', '.join(f'{i} ({often[i]:.0%})' for i in shaky)}." if shaky else ".")
            )
        lines.append("A score orders layers; it says neither how many can go nor what they cost together.")
        return lines

    def following(self) -> str:
        """`shrink`, which compares whole sets by their measured loss."""
        name, some = shlex.quote(self.model.name), max(1, len(self.scores) // 4)
        return f"shrink {name} --remove {some} -o smaller" if self.what == "layers" else ""


def require_periods(remove: int, layers: int, period: int) -> None:
    """Raise LyapunovPruneError unless `remove` layers are whole periods and at least one period is left."""
    most = (layers // period - 1) * period
    if remove % period or not 0 < remove <= most:
        choices = ", ".join(map(str, range(period, most + 1, period)[:3])) + (", …" if most > 3 * period else "")
        give = f"give --remove {choices}, or " if choices else ""
        raise LyapunovPruneError(
            f"{remove} layers are no whole periods that leave one: the kinds of these {layers} repeat every {period}; "
            f"{give}name the layers, as --layers 3,7"
        )
