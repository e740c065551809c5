"""Criterion `best`: compare by the loss the sets that cheap criteria propose, and search around the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lyapunov_prune.arguments import Count
from lyapunov_prune.data.batch import Tokens
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import POWER, apart
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.mending.judge import second_text
from lyapunov_prune.mending.mend import fitted_and_held
from lyapunov_prune.models.decoder import InMemory, runs_model
from lyapunov_prune.progress import phases
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.candidates import (
    GROWN,
    SOURCES,
    SearchCost,
    by_direction,
    end_turns,
    turn_at_the_end,
    turn_on_the_way,
)
from lyapunov_prune.ranking.counts import free_layers, protected_layers, require_count, search_budget
from lyapunov_prune.ranking.search import PART, Search, beginning
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store
from lyapunov_prune.sensitivity.sweep import Sweep

_SEARCH_SHARE = 1 / 3  # share of the forwards for the search if the rest goes to mending


@runs_model
def best_removal(
    model: InMemory,
    batch: Readable,
    remove: int,
    *,
    search: float | None = None,
    protect: Sequence[int] = (),
    mend: bool = False,
    judge: Tokens | None = None,
    folder: str | Path | None = None,
    batch_size: Count = 1,
) -> BestRemoval:
    """Choose `remove` layers of `model` that can be removed together, by the loss, for `search` forwards.

    Half of the windows of `batch` are check windows, which no score sees. The cheap criteria are measured on the
    beginnings of the others (`candidates`; a beginning is one `PART`-th of a window). Every set that one of them
    proposes is compared by its mean loss on the beginnings of the check windows. From the best set there single layers
    are swapped, the most promising swap first, for half of the remaining budget or until no swap is left. With the rest
    the sets are checked on all tokens of the check windows, in the order of their losses on the beginnings, and the one
    of least loss is chosen. A set that no checkpoint of the family can lose is not compared
    (`pruning.surgery.refusal`). Without `search` the budget is `search_budget`.

    With `mend`, for a removal whose gaps will be mended, a third of the budget goes to this search. With the rest, the
    sets of least loss are mended on the scored windows and compared with their gaps mended and open, on the check
    windows and on a second text, `judge`; if it is None, the dense model generates one (`mending.judge.second_text`).
    The maps of a set count if they pay on both texts (`mending.report.pays`). The set of least loss, averaged over both
    texts, is chosen. Layer 0 stays, because no layer before it could take a map; a set that cannot be mended is
    compared with open gaps.

    One forward is a forward of the dense model over the check windows, counted in multiplications; a check starts at
    the first removed layer (`Sweep`). A measurement is left out if it would cost more than a quarter of the remaining
    budget or refuses the model. What an earlier search of another number of layers measured on the reading `batch` is
    not measured again; it costs the same, so that the search finds what it would find alone. `protect` lists layers
    that stay, counted from the end if negative. Finished checks are kept in `folder` and not repeated.

    Raises LyapunovPruneError for a batch of fewer than 8 windows, too few tokens to mend on, a number of layers that
    cannot be removed beside the protected ones, a family that can lose none of the proposed sets, a budget smaller than
    one check, no set with a finite loss, a model that cannot generate a text to judge by, and as `Sweep` and the
    measurements do.
    """
    reading = read(model, batch)
    layers = reading.structure.num_layers
    require_count(remove, layers)
    protected = protected_layers(layers, (*protect, 0) if mend else protect, remove)
    free = free_layers(layers, protected)
    scoring, checking = apart(reading, of=2, most=None, least=POWER)
    held = _held_share(scoring) if mend else 0.0
    search = search_budget(layers, remove, mend) if search is None else float(search)
    share = _SEARCH_SHARE if mend else 1
    cost = SearchCost.of(checking, scoring)
    spent = _first_check(cost, remove, search, share)
    other = None
    if mend:
        other = read(model, second_text(reading, folder) if judge is None else judge)
    with (
        Store(folder, "best removal", _about(scoring, checking)) as store,
        Sweep(model, checking, folder=folder, batch_size=batch_size) as sweep,
        phases(2 + len(SOURCES) + mend) as begin_phase,
    ):
        tries = Search(sweep, scoring, store, cost, remove=remove, free=free, budget=share * search, spent=spent)
        begin_phase()
        angles = partial(angular_distance, reading.decoder, tries.scores, batch_size=batch_size)
        distance = _kept(store, "distance", lambda: tries.scores.once("distance", angles).distance)
        tries.look(by_direction(distance, remove, free))
        tries.propose(batch_size, begin_phase)
        tries.require_looked()
        begin_phase()
        if GROWN in tries.left_out:
            tries.swap(partial(turn_on_the_way, distance))
        else:
            turns = _kept(store, "turns", partial(end_turns, tries.scores, batch_size))
            tries.swap(partial(turn_at_the_end, turns))
        found = tries.result(search, protected)
        if other is None:
            return found
        begin_phase()
        tries.budget = search
        finals = tries.finals(other, held)
        if not finals:
            return replace(found, left_out=(*found.left_out, "mended sets"))
        return found.with_finals(finals, other.measured_on())


def _first_check(cost: SearchCost, remove: int, search: float, share: float) -> float:
    """The forwards spent before the first check; raises if a `share` of the `search` does not pay that check too."""
    spent = 1 + (1 + cost.scoring * cost.layers) / PART
    needed = spent + (1 + 1 / PART) * cost.without(range(remove), 0)
    if share * search < needed:
        raise LyapunovPruneError(
            f"a search of {search:g} forwards is less than the first check needs; give {needed / share:.1f} or more"
        )
    return spent


def _about(scoring: Reading, checking: Reading) -> dict[str, Any]:
    """What the measurements of every search on these texts depend on."""
    texts = {"checked_on": checking.measured_on().text_hash, "beginnings": beginning(scoring.batch)}
    return {**scoring.measured_on().key, **texts}


def _kept(store: Store, key: str, measure: Callable[[], np.ndarray]) -> np.ndarray:
    """What `measure` gives, kept in `store`."""
    if key not in store:
        store.add(key, encode(measure()))
    return decode(np.ndarray, store[key])


def _held_share(scoring: Reading) -> float:
    """The share of the scored windows that chooses among maps; raises if there are too few tokens to fit one."""
    fitted, held = fitted_and_held(scoring, of=2)
    return len(held) / (len(fitted) + len(held))
