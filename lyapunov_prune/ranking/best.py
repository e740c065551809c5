"""Criterion `best`: what the cheap criteria propose is checked by the loss, and the best of it searched around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.candidates import SOURCES, Cost, Layers, by_direction, swaps
from lyapunov_prune.ranking.criteria import SEARCH, free_layers, protected_layers, require_count, require_known_count
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.results.result import MeasuredOn, decode, encode
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sweep import Job, Sweep, badness

_LEAST_WINDOWS = 4
_PAYS = 0.05  # p below which a swap is believed


@dataclass(frozen=True)
class Tried:
    """A set of layers that was checked: the mean loss of every check window without it (nats), and the cost so far.

    `by` names the criteria that chose it, or the swap. `p_value` is that of the paired test of a swap against the best
    set of before, 1 where a loss is not finite, and NaN for what a criterion chose; `forwards` were spent when it was
    known.
    """

    by: str
    layers: Layers
    windows: np.ndarray
    p_value: float
    forwards: float


@dataclass(frozen=True)
class BestRemoval(Ranking):
    """The sets that were tried for a removal, in order, and the one that is believed best: `tried[chosen]`.

    `dense` is the loss of every check window of the dense model. Scores were measured on `measured_on`, losses on
    `checked_on`, other windows of the same text. `left_out` names the measurements that would have cost more than half
    of what was left of `search` forwards.
    """

    tried: tuple[Tried, ...]
    chosen: int
    dense: np.ndarray
    search: float
    left_out: tuple[str, ...]
    protected: Layers
    measured_on: MeasuredOn
    checked_on: MeasuredOn

    criterion = "best"
    what = "layers"

    def __post_init__(self) -> None:
        if not 0 <= self.chosen < len(self.tried):
            raise LyapunovPruneError(f"the search chose set {self.chosen} of {len(self.tried)}; search again")

    @property
    def remove(self) -> Layers:
        return self.tried[self.chosen].layers

    @property
    def forwards(self) -> float:
        """What was spent, in forwards of the dense model over the check windows."""
        return self.tried[-1].forwards

    @checked
    def plan(self, remove: int, period: int = 1) -> PruningPlan:
        """The plan that removes the chosen set.

        The score of a layer is the least mean loss (nats) of the tried sets it is in, NaN where it is in none. Raises
        LyapunovPruneError for another number of layers than was searched, and for periods, which are not kept.
        """
        require_known_count(self.criterion, remove, period > 1)
        if remove != len(self.remove):
            raise LyapunovPruneError(f"the search was for {len(self.remove)} layers, not {remove}; search again")
        scores = np.full(self.measured_on.model.num_layers, np.nan)
        for tried in self.tried:
            layers = list(tried.layers)
            scores[layers] = np.fmin(scores[layers], tried.windows.mean())
        return PruningPlan(
            remove=self.remove,
            criterion=self.criterion,
            alpha=None,
            scores=scores,
            model=self.measured_on.model,
            measured_on=(self.measured_on, self.checked_on),
            picked=self.picked(),
        )

    def picked(self, draws: int = 1000, seed: int = 0) -> np.ndarray:
        """How often each layer is in the best of the tried sets when the check windows are drawn anew, (L,)."""
        losses = np.array([tried.windows for tried in self.tried])
        windows = np.random.default_rng(seed).integers(losses.shape[1], size=(draws, losses.shape[1]))
        means = losses[:, windows].mean(-1)
        best = np.argmin(np.where(np.isnan(means), np.inf, means), axis=0)
        members = np.zeros((len(self.tried), self.measured_on.model.num_layers))
        for row, tried in zip(members, self.tried, strict=True):
            row[list(tried.layers)] = 1
        return members[best].mean(0)

    def to_frame(self) -> pd.DataFrame:
        means = np.array([tried.windows.mean() for tried in self.tried])
        with np.errstate(over="ignore"):
            perplexity = np.exp(means)
        return pd.DataFrame(
            {
                "by": [tried.by for tried in self.tried],
                "layers": [", ".join(map(str, tried.layers)) for tried in self.tried],
                "perplexity": perplexity,
                "× dense": np.exp(means - self.dense.mean()),
                "p": [tried.p_value for tried in self.tried],
                "forwards": [tried.forwards for tried in self.tried],
                "chosen": np.arange(len(self.tried)) == self.chosen,
            }
        )

    def headline(self) -> str:
        out = f"; not measured for its cost: {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"Best of {len(self.tried)} sets of {len(self.remove)} layers, by the loss of {len(self.dense)} windows "
            f"that no score has seen; {self.forwards:.1f} of {self.search:g} forwards spent{out}\n"
            f"Removes layers {', '.join(map(str, self.remove))}\n{self.checked_on.line()}"
        )


@checked
@in_eval_mode
@torch.no_grad()
def best_removal(
    model: PreTrainedModel,
    batch: Readable,
    remove: int,
    *,
    search: float = SEARCH,
    protect: Sequence[int] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    batch_size: int = 1,
) -> BestRemoval:
    """Choose `remove` layers of `model` that can go together, by the loss, at the cost of `search` forwards.

    Every second window of `batch` is kept from all scores, to check by. On the others the cheap criteria are measured
    (`candidates`), and each set that one proposes is checked: its mean loss on the check windows. From the best of them
    single layers are swapped, the most promising first, and a swap is taken when a paired t-test over the check windows
    says that it pays (p < 0.05, one-sided). It ends when the budget is spent or no swap is left.

    A forward is one of the dense model over the check windows, by multiplications; a check begins at the first layer
    that goes (`Sweep`). A measurement that would cost more than half of what is left is left out. `protect` names
    layers that stay, from the end if negative. Finished checks are kept in `folder` and with `resume` not repeated.

    Raises LyapunovPruneError for a batch of under four windows, for a number of layers that cannot go beside the
    protected, for a budget smaller than one check, where no set leaves a finite loss, and as `Sweep` and the
    measurements do.
    """
    reading = read(model, batch)
    layers = reading.structure.num_layers
    require_count(remove, layers)
    free = free_layers(layers, protect, remove)
    if len(reading.batch) < _LEAST_WINDOWS:
        raise LyapunovPruneError(
            f"criterion best scores on one half of the windows and checks on the other, and there are "
            f"{len(reading.batch)}; give {_LEAST_WINDOWS} or more (--tokens, --context)"
        )
    scoring, checking = (
        replace(reading, batch=reading.batch.take(range(first, len(reading.batch), 2))) for first in (0, 1)
    )
    cost = Cost.of(checking, scoring)
    first = 1 + cost.scoring * cost.layers
    if search < first + cost.without(range(remove), 0):
        raise LyapunovPruneError(
            f"a search of {search:g} forwards is less than the first check needs; give "
            f"{first + cost.without(range(remove), 0):.1f} or more, 20 or so"
        )
    measured_on, checked_on = scoring.measured_on(), checking.measured_on()
    folder = None if folder is None else Path(folder)
    about = {**encode(measured_on), "checked_on": encode(checked_on), "remove": remove, "free": list(free)}
    with (
        Store(folder, "best removal", about, resume=resume) as store,
        Sweep(
            model,
            checking,
            folder=None if folder is None else folder / "checks",
            resume=resume,
            batch_size=batch_size,
        ) as sweep,
    ):
        walk = _Walk(sweep, cost, search, first)
        if "distance" not in store:
            store.add("distance", encode(angular_distance(model, scoring, batch_size=batch_size).distance))
        distance = decode(np.ndarray, store["distance"])
        walk.check(by_direction(distance, remove, free))
        left_out = []
        for name, source in SOURCES.items():
            price = cost.scoring * source.cost(cost, remove)
            if price > (search - walk.spent) / 2:
                left_out.append(name)
                continue
            if name not in store:
                store.add(name, source.sets(scoring, remove, free, batch_size))
            walk.spent += price
            walk.check({by: tuple(chosen) for by, chosen in store[name].items()})
        walk.search(distance, free)
        return BestRemoval(
            tried=tuple(walk.tried),
            chosen=walk.best,
            dense=sweep.dense,
            search=float(search),
            left_out=tuple(left_out),
            protected=protected_layers(layers, protect),
            measured_on=measured_on,
            checked_on=checked_on,
        )


class _Walk:
    """The sets that were tried so far, the best of them, and what they have cost."""

    def __init__(self, sweep: Sweep, cost: Cost, search: float, spent: float) -> None:
        self.sweep, self.cost, self.budget, self.spent = sweep, cost, search, spent
        self.tried: list[Tried] = []
        self.best = 0

    def check(self, sets: dict[str, Layers]) -> None:
        """The sets that criteria propose, those that the budget still allows; the best is that of least loss."""
        proposed: dict[Layers, list[str]] = {}
        for by, layers in sets.items():
            proposed.setdefault(layers, []).append(by)
        known = {tried.layers for tried in self.tried}
        chosen, left = [], self.budget - self.spent
        for layers in proposed:
            if layers not in known and self._price(layers) <= left:
                chosen.append(layers)
                left -= self._price(layers)
        for layers, windows in self._losses(chosen, "checking sets").items():
            self._add(", ".join(proposed[layers]), layers, windows, np.nan)
        self.best = min(range(len(self.tried)), key=lambda k: badness(float(self.tried[k].windows.mean())))

    def search(self, distance: np.ndarray, free: Layers) -> None:
        """Swap single layers while one pays."""
        if not np.isfinite(self.tried[self.best].windows).all():
            raise LyapunovPruneError(
                "no set that was tried leaves a finite loss; remove fewer layers, or load the model in a wider dtype"
            )
        while True:
            current = self.tried[self.best]
            losses = {tried.layers: tried.windows.mean() - self.sweep.dense.mean() for tried in self.tried}
            promising = next(swaps(current.layers, free, losses, distance), None)
            if promising is None or self.spent + self._price(promising) > self.budget:
                return
            windows = self._losses([promising], f"a swap, {self.spent:.1f} of {self.budget:g} forwards")[promising]
            p_value = np.nan_to_num(stats.ttest_rel(windows, current.windows, alternative="less").pvalue, nan=1.0)
            goes, stays = set(promising) - set(current.layers), set(current.layers) - set(promising)
            self._add(f"{goes.pop()} for {stays.pop()}", promising, windows, float(p_value))
            if p_value < _PAYS:
                self.best = len(self.tried) - 1

    def _price(self, layers: Layers) -> float:
        return self.cost.without(layers, self.sweep.reading.prefix.entry(min(layers)))

    def _losses(self, sets: Sequence[Layers], description: str) -> dict[Layers, np.ndarray]:
        jobs = {layers: Job(",".join(map(str, layers)), min(layers), remove=layers) for layers in sets}
        outcomes = self.sweep.run(jobs.values(), description)
        return {layers: outcomes[job.key].windows for layers, job in jobs.items()}

    def _add(self, by: str, layers: Layers, windows: np.ndarray, p_value: float) -> None:
        self.spent += self._price(layers)
        self.tried.append(Tried(by, layers, windows, p_value, self.spent))
