"""The search of criterion `best`: sets that criteria propose, swaps of single layers, and sets that are mended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.mending.judge import losses
from lyapunov_prune.mending.mend import Mend
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.pruning.surgery import refusal
from lyapunov_prune.ranking.candidates import SOURCES, Layers, SearchCost, swaps
from lyapunov_prune.ranking.tried import BestRemoval, Final, Tried
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.changes import badness
from lyapunov_prune.sensitivity.sweep import Job, Sweep

_FINALS = 4  # how many sets are mended at most
Fit = Callable[..., tuple[tuple[Mend, ...], MendReport]]  # the signature of `fit_mends`


class Search:
    """The sets of `remove` layers of `free` that were tried so far, the best of them, and the forwards they cost.

    Scores are measured on the reading `scoring`, losses by `sweep`; finished measurements are kept in `store`. At most
    `budget` forwards are spent, of which `spent` are spent already.
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
        self.remove, self.free, self.budget, self.spent = remove, free, budget, spent
        self.tried: list[Tried] = []
        self.left_out: list[str] = []
        self._refusals: dict[Layers, str | None] = {}

    @property
    def best(self) -> int:
        return self._order()[0]

    def _order(self) -> list[int]:
        """The tried sets, the one of least loss first."""
        return sorted(range(len(self.tried)), key=lambda k: badness(float(self.tried[k].windows.mean())))

    def check(self, sets: dict[str, Layers]) -> None:
        """Check the sets that criteria propose, as far as the budget allows."""
        proposed: dict[Layers, list[str]] = {}
        for by, layers in sets.items():
            proposed.setdefault(layers, []).append(by)
        known = {tried.layers for tried in self.tried}
        chosen, left = [], self.budget - self.spent
        for layers in proposed:
            if layers not in known and self._price(layers) <= left and self._removable(layers):
                chosen.append(layers)
                left -= self._price(layers)
        for layers, windows in self._losses(chosen, "checking sets").items():
            self._add(", ".join(proposed[layers]), layers, windows, swap=False)

    def propose(self, batch_size: int, begin_phase: Callable[[], None]) -> None:
        """Check the sets of every source that half of the remaining budget pays; the others are `left_out`.

        Raises NonFiniteError of a measurement; a source that refuses the model is left out.
        """
        for name, source in SOURCES.items():
            begin_phase()
            price = self.cost.scoring * source.cost(self.cost, self.remove)
            if price > (self.budget - self.spent) / 2:
                self.left_out.append(name)
                continue
            key = f"{name}, {self.remove} of {','.join(map(str, self.free))}"
            if key not in self.store:
                try:
                    self.store.add(key, source.sets(self.scoring, self.remove, self.free, batch_size))
                except NonFiniteError:
                    raise
                except LyapunovPruneError:  # some families cannot be measured by some criteria
                    self.left_out.append(name)
                    continue
            self.spent += price
            self.check({by: tuple(chosen) for by, chosen in self.store[key].items()})

    def swap(self, distance: np.ndarray) -> None:
        """Swap single layers of the best set until the budget is spent or no swap is left to try."""
        if not np.isfinite(self.tried[self.best].windows).all():
            raise LyapunovPruneError(
                "no set that was tried leaves a finite loss; remove fewer layers, or load the model in a wider dtype"
            )
        while True:
            current = self.tried[self.best].layers
            known = {tried.layers: tried.windows.mean() - self.sweep.dense.mean() for tried in self.tried}
            promising = next(filter(self._removable, swaps(current, self.free, known, distance)), None)
            if promising is None or self.spent + self._price(promising) > self.budget:
                return
            windows = self._losses([promising], f"a swap, {self.spent:.1f} of {self.budget:g} forwards")[promising]
            goes, stays = set(promising) - set(current), set(current) - set(promising)
            self._add(f"{goes.pop()} for {stays.pop()}", promising, windows, swap=True)

    def require_tried(self) -> None:
        """Check the last layers if every proposed set was refused; raise LyapunovPruneError if they are as well."""
        if not self.tried:
            self.check({"from-end": self.free[-self.remove :]})
        if not self.tried:
            why = next(why for why in self._refusals.values() if why)
            raise LyapunovPruneError(f"no set of {self.remove} layers that was proposed can be removed: {why}")

    def finals(self, other: Reading, held: float, fit: Fit) -> list[Final]:
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
                self.store.add(key, encode(self._judged(other, layers, fit)))
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

    def _judged(self, other: Reading, layers: Layers, fit: Fit) -> list[np.ndarray]:
        """The fields of `Final`; NaN if a gap cannot be mended."""
        cut = losses(other, layers)
        try:
            mends, _ = fit(self.scoring.model, layers, self.scoring, of=2)
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

    def _losses(self, sets: Sequence[Layers], description: str) -> dict[Layers, np.ndarray]:
        jobs = {layers: Job(",".join(map(str, layers)), min(layers), remove=layers) for layers in sets}
        outcomes = self.sweep.run(jobs.values(), description)
        return {layers: outcomes[job.key].windows for layers, job in jobs.items()}

    def _add(self, by: str, layers: Layers, windows: np.ndarray, *, swap: bool) -> None:
        self.spent += self._price(layers)
        self.tried.append(Tried(by, layers, windows, swap, self.spent))
