"""Criterion `best`: check by the loss the sets that cheap criteria propose, and search around the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lyapunov_prune.arguments import Count
from lyapunov_prune.data.batch import Tokens
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.evaluation.judging import apart
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.mending.judge import losses, second_text
from lyapunov_prune.mending.mend import Mend, fit_mends, fitted_and_held
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import InMemory, takes_model
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import phases
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.candidates import SOURCES, Cost, Layers, by_direction, swaps
from lyapunov_prune.ranking.counts import free_layers, protected_layers, require_count, search_budget
from lyapunov_prune.ranking.tried import BestRemoval, Final, Tried
from lyapunov_prune.results.result import decode, encode
from lyapunov_prune.results.store import Store, clear_results
from lyapunov_prune.sensitivity.sweep import Job, Sweep, badness, clear_sweep

_KIND, _CHECKS = "best removal", "checks"  # the kind of the store, and the folder of its sweep
_LEAST_WINDOWS = 2
_SEARCH_SHARE = 0.5  # share of the forwards for the search if the rest goes to mending
_FINALS = 4  # how many sets are mended at most
Fit = Callable[..., tuple[tuple[Mend, ...], MendReport]]  # the signature of `fit_mends`


@takes_model
@in_eval_mode
@torch.no_grad()
def best_removal(
    model: InMemory,
    batch: Readable,
    remove: int,
    *,
    search: float | None = None,
    protect: Sequence[int] = (),
    mend: bool = False,
    judge: Tokens | None = None,
    fit: Fit = fit_mends,
    folder: str | Path | None = None,
    batch_size: Count = 1,
) -> BestRemoval:
    """Choose `remove` layers of `model` that can be removed together, by the loss, for `search` forwards.

    Every second window of `batch` is a check window, which no score sees. The cheap criteria are measured on the other
    windows (`candidates`), and every set that one of them proposes is checked by its mean loss on the check windows.
    From the best set single layers are then swapped, the most promising swap first; a swap is accepted if it lowers the
    loss. The search ends when the budget is spent or no swap is left. Without `search` the budget is `search_budget`.

    With `mend`, for a removal whose gaps will be mended, half of the budget goes to this search. With the rest, the
    sets of least loss are mended on the scored windows and compared with their gaps mended and open, on the check
    windows and on a second text, `judge`; if it is None, the dense model generates one (`mending.judge.second_text`).
    The maps of a set count if they pay on both texts (`mending.report.pays`). The set of least loss, averaged over both
    texts, is chosen. Layer 0 stays, because no layer before it could take a map; a set that cannot be mended is
    compared with open gaps. `fit` makes the maps; a `fit` that keeps them spares a second fit of the chosen set.

    One forward is a forward of the dense model over the check windows, counted in multiplications; a check starts at
    the first removed layer (`Sweep`). A measurement is left out if it would cost more than half of the remaining budget
    or refuses the model. What an earlier search of another number of layers measured on the reading `batch` is not
    measured again; it costs the same, so that the search finds what it would find alone. `protect` lists layers that
    stay, counted from the end if negative. Finished checks are kept in `folder` and not repeated.

    Raises LyapunovPruneError for a batch of one window, too few tokens to mend on, a number of layers that cannot be
    removed beside the protected ones, a budget smaller than one check, no set with a finite loss, a model that cannot
    generate a text to judge by, and as `Sweep` and the measurements do.
    """
    reading = read(model, batch)
    layers = reading.structure.num_layers
    require_count(remove, layers)
    protected = protected_layers(layers, (*protect, 0) if mend else protect, remove)
    free = free_layers(layers, protected)
    if len(reading.batch) < _LEAST_WINDOWS:
        raise LyapunovPruneError(
            "criterion best scores on one half of the windows and checks on the other, and there is one; give "
            f"{_LEAST_WINDOWS} or more (--tokens, --context), or another criterion (--criterion bi)"
        )
    scoring, checking = apart(reading, every=2, most=None)
    held = _held_share(scoring) if mend else 0.0
    search = search_budget(layers, remove, mend) if search is None else float(search)
    cost = Cost.of(checking, scoring)
    first = 1 + cost.scoring * cost.layers
    share = _SEARCH_SHARE if mend else 1
    if share * search < first + cost.without(range(remove), 0):
        raise LyapunovPruneError(
            f"a search of {search:g} forwards is less than the first check needs; give "
            f"{(first + cost.without(range(remove), 0)) / share:.1f} or more, 20 or so"
        )
    other = None
    if mend:
        other = read(model, second_text(reading) if judge is None else judge)
    measured_on, checked_on = scoring.measured_on(), checking.measured_on()
    folder = None if folder is None else Path(folder)
    about = {**encode(measured_on), "checked_on": encode(checked_on), "remove": remove, "free": list(free)}
    if other is not None:
        about["other_on"] = encode(other.measured_on())
    with (
        Store(folder, _KIND, about) as store,
        Sweep(
            model,
            checking,
            folder=None if folder is None else folder / _CHECKS,
            batch_size=batch_size,
        ) as sweep,
        phases(2 + len(SOURCES) + mend) as begin_phase,
    ):
        begin_phase()
        walk = _Walk(sweep, cost, share * search, first)
        if "distance" not in store:
            measured = scoring.once("distance", lambda: angular_distance(model, scoring, batch_size=batch_size))
            store.add("distance", encode(measured.distance))
        distance = decode(np.ndarray, store["distance"])
        walk.check(by_direction(distance, remove, free))
        left_out = []
        for name, source in SOURCES.items():
            begin_phase()
            price = cost.scoring * source.cost(cost, remove)
            if price > (walk.budget - walk.spent) / 2:
                left_out.append(name)
                continue
            if name not in store:
                try:
                    store.add(name, source.sets(scoring, remove, free, batch_size))
                except NonFiniteError:
                    raise
                except LyapunovPruneError:  # some families cannot be measured by some criteria
                    left_out.append(name)
                    continue
            walk.spent += price
            walk.check({by: tuple(chosen) for by, chosen in store[name].items()})
        begin_phase()
        walk.search(distance, free)
        found = BestRemoval(
            tried=tuple(walk.tried),
            chosen=walk.best,
            dense=sweep.dense,
            search=search,
            left_out=tuple(left_out),
            protected=protected,
            measured_on=measured_on,
            checked_on=checked_on,
        )
        if other is None:
            return found
        begin_phase()
        walk.budget = search
        finals = walk.finals(scoring, other, held, store, fit)
        if not finals:
            return replace(found, left_out=(*left_out, "mended sets"))
        return found.with_finals(finals, other.measured_on())


def clear_search(folder: Path) -> None:
    """Delete what a search kept in `folder`. Raises as `Store` does."""
    clear_sweep(folder / _CHECKS)
    clear_results(folder, _KIND)


def _held_share(scoring: Reading) -> float:
    """The share of the scored windows that chooses among maps; raises if there are too few tokens to fit one."""
    fitted, held = fitted_and_held(scoring, of=2)
    return len(held) / (len(fitted) + len(held))


class _Walk:
    """The sets tried so far, the best of them, and what they cost."""

    def __init__(self, sweep: Sweep, cost: Cost, budget: float, spent: float) -> None:
        self.sweep, self.cost, self.budget, self.spent = sweep, cost, budget, spent
        self.tried: list[Tried] = []

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
            if layers not in known and self._price(layers) <= left:
                chosen.append(layers)
                left -= self._price(layers)
        for layers, windows in self._losses(chosen, "checking sets").items():
            self._add(", ".join(proposed[layers]), layers, windows, swap=False)

    def search(self, distance: np.ndarray, free: Layers) -> None:
        """Swap single layers of the best set until the budget is spent or no swap is left to try."""
        if not np.isfinite(self.tried[self.best].windows).all():
            raise LyapunovPruneError(
                "no set that was tried leaves a finite loss; remove fewer layers, or load the model in a wider dtype"
            )
        while True:
            current = self.tried[self.best].layers
            known = {tried.layers: tried.windows.mean() - self.sweep.dense.mean() for tried in self.tried}
            promising = next(swaps(current, free, known, distance), None)
            if promising is None or self.spent + self._price(promising) > self.budget:
                return
            windows = self._losses([promising], f"a swap, {self.spent:.1f} of {self.budget:g} forwards")[promising]
            goes, stays = set(promising) - set(current), set(current) - set(promising)
            self._add(f"{goes.pop()} for {stays.pop()}", promising, windows, swap=True)

    def finals(self, scoring: Reading, other: Reading, held: float, store: Store, fit: Fit) -> list[Final]:
        """Judge the sets of least loss with their gaps mended and open, on the check windows and on `other`."""
        ratio = other.batch.ids.numel() / self.sweep.reading.batch.ids.numel()
        found: list[Final] = []
        for number in self._order()[:_FINALS]:
            layers = self.tried[number].layers
            price = self.cost.mending(layers, held) + (1 + 2 * ratio) * self.cost.without(layers, 0)
            if self.spent + price > self.budget or not np.isfinite(self.tried[number].windows).all():
                break
            key = f"final {','.join(map(str, layers))}"
            if key not in store:
                store.add(key, encode(self._judged(scoring, other, layers, fit)))
            self.spent += price
            mended, other_cut, other_mended = decode(list[np.ndarray], store[key])
            found.append(Final(layers, mended, other_cut, other_mended, self.spent))
        return found

    def _judged(self, scoring: Reading, other: Reading, layers: Layers, fit: Fit) -> list[np.ndarray]:
        """The fields of `Final`; NaN if a gap cannot be mended."""
        cut = losses(other, layers)
        try:
            mends, _ = fit(scoring.model, layers, scoring, of=2)
        except LyapunovPruneError:
            return [np.full_like(self.sweep.dense, np.nan), cut, np.full_like(cut, np.nan)]
        return [losses(self.sweep.reading, layers, mends), cut, losses(other, layers, mends)]

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
