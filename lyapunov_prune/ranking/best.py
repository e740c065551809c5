"""Criterion `best`: what the cheap criteria propose is checked by the loss, and the best of it searched around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.mending.mend import fit_mends, fitted_and_held, mapped
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.candidates import SOURCES, Cost, Layers, by_direction, swaps
from lyapunov_prune.ranking.criteria import SEARCH, free_layers, protected_layers, require_count
from lyapunov_prune.ranking.tried import BestRemoval, Mended, Tried
from lyapunov_prune.results.result import decode, encode
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sweep import Job, Sweep, badness

_LEAST_WINDOWS = 4
PAYS = 0.05  # p below which a swap is believed


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
    mend: bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    batch_size: int = 1,
) -> BestRemoval:
    """Choose `remove` layers of `model` that can go together, by the loss, at the cost of `search` forwards.

    Every second window of `batch` is kept from all scores, to check by. On the others the cheap criteria are measured
    (`candidates`), and each set that one proposes is checked: its mean loss on the check windows. From the best of them
    single layers are swapped, the most promising first, and a swap is taken when a paired t-test over the check windows
    says that it pays (p < 0.05, one-sided). It ends when the budget is spent or no swap is left.

    With `mend`, for a removal whose gaps will be mended (`mending.fit_mends`), nothing is swapped: the sets of least
    loss are mended on the scored windows, one after the other while the budget lasts, and the one that then loses least
    is chosen. Layer 0 stays, as nothing could stand in for it; a set that cannot be mended is passed over.

    A forward is one of the dense model over the check windows, by multiplications; a check begins at the first layer
    that goes (`Sweep`). A measurement that would cost more than half of what is left is left out. `protect` names
    layers that stay, from the end if negative. Finished checks are kept in `folder` and with `resume` not repeated.

    Raises LyapunovPruneError for a batch of under four windows, for too few tokens to mend by, for a number of layers
    that cannot go beside the protected, for a budget smaller than one check, where no set leaves a finite loss, and as
    `Sweep` and the measurements do.
    """
    reading = read(model, batch)
    layers = reading.structure.num_layers
    require_count(remove, layers)
    protected = protected_layers(layers, (*protect, 0) if mend else protect, remove)
    free = free_layers(layers, protected)
    if len(reading.batch) < _LEAST_WINDOWS:
        raise LyapunovPruneError(
            f"criterion best scores on one half of the windows and checks on the other, and there are "
            f"{len(reading.batch)}; give {_LEAST_WINDOWS} or more (--tokens, --context)"
        )
    scoring, checking = (
        replace(reading, batch=reading.batch.take(range(first, len(reading.batch), 2))) for first in (0, 1)
    )
    held = _held_share(scoring) if mend else 0.0
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
    if mend:
        about["mend"] = True
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
        mended = walk.mended(scoring, held, store) if mend else walk.search(distance, free)
        return BestRemoval(
            tried=tuple(walk.tried),
            chosen=walk.best,
            dense=sweep.dense,
            search=float(search),
            left_out=(*left_out, "mended sets") if mend and not mended else tuple(left_out),
            protected=protected,
            measured_on=measured_on,
            checked_on=checked_on,
            mended=mended,
        )


def _held_share(scoring: Reading) -> float:
    """The share of the scored windows that will choose among maps; raises where there are too few tokens for any."""
    fitted, held = fitted_and_held(scoring, of=2)
    return len(held) / (len(fitted) + len(held))


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

    def mended(self, scoring: Reading, held: float, store: Store) -> tuple[Mended, ...]:
        """The sets of least loss, mended; the best is that of least loss then."""
        self._require_finite()
        found: list[Mended] = []
        order = sorted(range(len(self.tried)), key=lambda k: badness(float(self.tried[k].windows.mean())))
        for number in order:
            layers = self.tried[number].layers
            price = self.cost.mending(layers, held) + self._price(layers, before=1)
            if self.spent + price > self.budget:
                continue
            key = f"mended {','.join(map(str, layers))}"
            if key not in store:
                store.add(key, encode(self._losses_mended(key, scoring, layers)))
            self.spent += price
            windows = decode(np.ndarray, store[key])
            if np.isfinite(windows).all():
                found.append(Mended(layers, windows, self.spent))
        if found:
            best = min(found, key=lambda mended: float(mended.windows.mean())).layers
            self.best = next(k for k, tried in enumerate(self.tried) if tried.layers == best)
        return tuple(found)

    def _losses_mended(self, key: str, scoring: Reading, layers: Layers) -> np.ndarray:
        """NaN where a gap cannot be mended."""
        try:
            mends, _ = fit_mends(scoring.model, layers, scoring)
        except LyapunovPruneError:
            return np.full_like(self.sweep.dense, np.nan)
        around = partial(mapped, scoring.structure.layers, mends)
        job = Job(key, min(layers) - 1, remove=layers, around=around)
        return self.sweep.run([job], "checking a mended set")[key].windows

    def _require_finite(self) -> None:
        if not np.isfinite(self.tried[self.best].windows).all():
            raise LyapunovPruneError(
                "no set that was tried leaves a finite loss; remove fewer layers, or load the model in a wider dtype"
            )

    def search(self, distance: np.ndarray, free: Layers) -> tuple[Mended, ...]:
        """Swap single layers while one pays; nothing is mended."""
        self._require_finite()
        while True:
            current = self.tried[self.best]
            losses = {tried.layers: tried.windows.mean() - self.sweep.dense.mean() for tried in self.tried}
            promising = next(swaps(current.layers, free, losses, distance), None)
            if promising is None or self.spent + self._price(promising) > self.budget:
                return ()
            windows = self._losses([promising], f"a swap, {self.spent:.1f} of {self.budget:g} forwards")[promising]
            p_value = np.nan_to_num(stats.ttest_rel(windows, current.windows, alternative="less").pvalue, nan=1.0)
            goes, stays = set(promising) - set(current.layers), set(current.layers) - set(promising)
            self._add(f"{goes.pop()} for {stays.pop()}", promising, windows, float(p_value))
            if p_value < PAYS:
                self.best = len(self.tried) - 1

    def _price(self, layers: Layers, before: int = 0) -> float:
        """Of a check that begins so many layers `before` the first that goes."""
        return self.cost.without(layers, self.sweep.reading.prefix.entry(min(layers) - before))

    def _losses(self, sets: Sequence[Layers], description: str) -> dict[Layers, np.ndarray]:
        jobs = {layers: Job(",".join(map(str, layers)), min(layers), remove=layers) for layers in sets}
        outcomes = self.sweep.run(jobs.values(), description)
        return {layers: outcomes[job.key].windows for layers, job in jobs.items()}

    def _add(self, by: str, layers: Layers, windows: np.ndarray, p_value: float) -> None:
        self.spent += self._price(layers)
        self.tried.append(Tried(by, layers, windows, p_value, self.spent))
