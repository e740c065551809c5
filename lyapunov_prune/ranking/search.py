"""The search of criterion `best`: proposed sets and single swaps, compared on few tokens, on all, and mended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.mending.judge import losses
from lyapunov_prune.mending.mend import fit_mends
from lyapunov_prune.pruning.surgery import refusal
from lyapunov_prune.ranking.candidates import SOURCES, Layers, SearchCost, TurnOf, swaps
from lyapunov_prune.ranking.tried import BestRemoval, Final, Tried
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.changes import badness
from lyapunov_prune.sensitivity.sweep import DENSE, Job, Sweep

_FINALS = 4  # how many sets are mended at most
PART = 4  # the beginnings are this part of each check window
_LOOKS = 0.5  # share of the forwards that are left once the criteria are measured, for swaps on the beginnings


class Search:
    """The sets of `remove` layers of `free` that were tried so far, the best of them, and the forwards they cost.

    Scores are measured on the beginnings of the windows of `scoring`, losses by `sweep`: of many sets on the beginnings
    of its windows, and of the best of these on all tokens. Finished measurements are kept in `store`. At most `budget`
    forwards are spent, of which `spent` are spent already.
    """

    def __init__(
        self,
        sweep: Sweep,
        scoring: Reading,
        store: Store,
        cost: SearchCost,
        *,
        remove: int,
        free: Layers,
        budget: float,
        spent: float,
    ) -> None:
        self.sweep, self.scoring, self.store, self.cost = sweep, scoring, store, cost
        self.scores = beginnings(scoring)
        self.remove, self.free, self.budget, self.spent = remove, free, budget, spent
        self._looks = budget - cost.without(range(remove), 0)  # one check remains to be paid
        self.tried: list[Tried] = []
        self.left_out: list[str] = []
        self._looked: dict[Layers, float] = {}  # mean loss above dense on the beginnings, nats
        self._by: dict[Layers, tuple[str, bool]] = {}
        self._refusals: dict[Layers, str | None] = {}

    @property
    def best(self) -> int:
        return self._order()[0]

    def _order(self) -> list[int]:
        """The tried sets, the one of least loss first."""
        return sorted(range(len(self.tried)), key=lambda k: badness(float(self.tried[k].windows.mean())))

    def _nearest(self) -> list[Layers]:
        """The sets that were compared on the beginnings, the one of least loss first."""
        return sorted(self._looked, key=lambda layers: badness(self._looked[layers]))

    def look(self, sets: dict[str, Layers]) -> None:
        """Compare the sets that criteria propose on the beginnings, as far as the budget allows."""
        proposed: dict[Layers, list[str]] = {}
        for by, layers in sets.items():
            proposed.setdefault(layers, []).append(by)
        new = [layers for layers in proposed if layers not in self._looked and self._removable(layers)]
        chosen = self._affordable(new, self._looks, PART)
        self._look({layers: (", ".join(proposed[layers]), False) for layers in chosen})

    def propose(self, batch_size: int, begin_phase: Callable[[], None]) -> None:
        """Look at the sets of every source that a quarter of the remaining budget pays; the others are `left_out`.

        Raises NonFiniteError of a measurement; a source that refuses the model is left out.
        """
        for name, source in SOURCES.items():
            begin_phase()
            price = self.cost.scoring / PART * source.cost(self.cost, self.remove)
            if price > (self._looks - self.spent) / 4:
                self.left_out.append(name)
                continue
            key = f"{name}, {self.remove} of {','.join(map(str, self.free))}"
            if key not in self.store:
                try:
                    self.store.add(key, source.sets(self.scores, self.remove, self.free, batch_size))
                except NonFiniteError:
                    raise
                except LyapunovPruneError:  # some families cannot be measured by some criteria
                    self.left_out.append(name)
                    continue
            self.spent += price
            self.look({by: tuple(chosen) for by, chosen in self.store[key].items()})

    def swap(self, turn_of: TurnOf) -> None:
        """Swap single layers of the best set, by the beginnings, for half of the remaining budget; then check the best.

        These are checked on all tokens, in their order on the beginnings, as far as the budget goes.
        """
        limit = min(self.spent + _LOOKS * (self.budget - self.spent), self._looks)
        while np.isfinite(self._looked[current := self._nearest()[0]]):
            promising = next(filter(self._removable, swaps(current, self.free, self._looked, turn_of)), None)
            if promising is None or not self._affordable([promising], limit, PART):
                break
            goes, stays = set(promising) - set(current), set(current) - set(promising)
            self._look({promising: (f"{goes.pop()} for {stays.pop()}", True)})
        chosen = self._affordable(self._nearest(), self.budget)
        for layers, windows in self._losses(chosen, "checking sets").items():
            by, swap = self._by[layers]
            self.spent += self._price(layers)
            self.tried.append(Tried(by, layers, windows, swap, self.spent))
        if not np.isfinite(self.tried[self.best].windows).all():
            raise LyapunovPruneError(
                "no set that was tried leaves a finite loss; remove fewer layers, or load the model in a wider dtype"
            )

    def require_looked(self) -> None:
        """Look at the last layers in turn that can go if every proposed set was refused; raise if there are none."""
        if not self._looked:
            runs = [self.free[end - self.remove : end] for end in range(len(self.free), self.remove - 1, -1)]
            self.look({"from-end": next(filter(self._removable, runs), runs[0])})
        if not self._looked:
            why = next(why for why in self._refusals.values() if why)
            raise LyapunovPruneError(f"no set of {self.remove} layers that was proposed can be removed: {why}")

    def finals(self, other: Reading, held: float) -> list[Final]:
        """Judge the sets of least loss with their gaps mended and open, on the check windows and on `other`."""
        ratio = other.batch.ids.numel() / self.sweep.reading.batch.ids.numel()
        found: list[Final] = []
        text = other.measured_on().text_hash
        for number in self._order()[:_FINALS]:
            layers = self.tried[number].layers
            price = self.cost.mending(layers, held) + (1 + 2 * ratio) * self.cost.without(layers, 0)
            if self.spent + price > self.budget or not np.isfinite(self.tried[number].windows).all():
                break
            key = f"final {','.join(map(str, layers))} on {text}"
            if key not in self.store:
                self.store.add(key, encode(self._judged(other, layers)))
            self.spent += price
            mended, other_cut, other_mended = decode(list[np.ndarray], self.store[key])
            found.append(Final(layers, mended, other_cut, other_mended, self.spent))
        return found

    def result(self, search: float, protected: Layers) -> BestRemoval:
        """What was tried, for a search of `search` forwards that left `protected` alone."""
        return BestRemoval(
            tried=tuple(self.tried),
            chosen=self.best,
            dense=self.sweep.dense,
            search=search,
            left_out=tuple(self.left_out),
            protected=protected,
            measured_on=self.scoring.measured_on(),
            checked_on=self.sweep.measured_on,
        )

    def _judged(self, other: Reading, layers: Layers) -> list[np.ndarray]:
        """The fields of `Final`; NaN if a gap cannot be mended."""
        cut = losses(other, layers)
        try:
            mends, _ = fit_mends(self.scoring.model, layers, self.scoring, of=2)
        except LyapunovPruneError:
            return [np.full_like(self.sweep.dense, np.nan), cut, np.full_like(cut, np.nan)]
        return [losses(self.sweep.reading, layers, mends), cut, losses(other, layers, mends)]

    def _removable(self, layers: Layers) -> bool:
        """Whether a checkpoint of this family can hold the model without `layers`."""
        if layers not in self._refusals:
            self._refusals[layers] = refusal(self.scoring.decoder, layers)
        return self._refusals[layers] is None

    def _price(self, layers: Layers) -> float:
        """The cost of a check in forwards; it starts at the first removed layer."""
        return self.cost.without(layers, self.sweep.reading.prefix.entry(min(layers)))

    def _affordable(self, sets: Sequence[Layers], limit: float, part: int = 1) -> Sequence[Layers]:
        """The first of `sets`: those that can be scored on one `part`-th of the tokens within `limit` forwards."""
        spent = self.spent + np.cumsum([self._price(layers) / part for layers in sets])
        return sets[: int(np.searchsorted(spent, limit, side="right"))]

    def _look(self, sets: dict[Layers, tuple[str, bool]]) -> None:
        """Score `sets` on the beginnings of the check windows; each has its `Tried.by` and `Tried.swap`."""
        description = f"comparing sets, {self.spent:.1f} of {self.budget:g} forwards"
        found = self._losses([(), *sets], description, beginning(self.sweep.reading.batch))
        dense = found.pop(()).mean()
        for layers, windows in found.items():
            self.spent += self._price(layers) / PART
            self._looked[layers], self._by[layers] = float(windows.mean() - dense), sets[layers]

    def _losses(self, sets: Sequence[Layers], description: str, tokens: int | None = None) -> dict[Layers, np.ndarray]:
        of = "" if tokens is None else f" of {tokens} tokens"
        keys = {layers: (",".join(map(str, layers)) or DENSE) + of for layers in sets}
        jobs = {layers: Job(key, min(layers, default=0), remove=layers, tokens=tokens) for layers, key in keys.items()}
        outcomes = self.sweep.run(jobs.values(), description)
        return {layers: outcomes[job.key].windows for layers, job in jobs.items()}


def beginning(batch: TokenBatch) -> int:
    """The number of tokens of the beginning of each window, on which scores are measured and many sets compared."""
    return max(2, batch.context // PART)


def beginnings(reading: Reading) -> Reading:
    """The reading of the beginnings of the windows of `reading`, the same one each time."""
    ids = reading.batch.ids[:, : beginning(reading.batch)]
    return reading.once("beginnings", lambda: replace(reading, batch=replace(reading.batch, ids=ids)))
