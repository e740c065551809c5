"""Sets of layers that the cheap criteria would remove, and what it costs to measure them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, get_args

import numpy as np
import torch

from lyapunov_prune.forward.dealing import dealt
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.reading import Reading
from lyapunov_prune.forward.states import changed_finals, predicting
from lyapunov_prune.mending.mend import TRIALS
from lyapunov_prune.predictions.divergence import skip_divergence
from lyapunov_prune.predictions.spaces import turn
from lyapunov_prune.profiles.contraction_profile import Pooling
from lyapunov_prune.profiles.profile import profile_layers
from lyapunov_prune.progress import track
from lyapunov_prune.ranking.criterion import Scored
from lyapunov_prune.ranking.table import CRITERIA

Layers = tuple[int, ...]
TurnOf = Callable[[Layers], float]  # how far the state turns without a set of layers
_SEEDS = (0, 1)
_RUNS = (2, 3)
_FEW = 2  # for the set that grows one window in so many is read, and so great a part of each
_RETRIED = 2
_RIDGE = 0.3
_TINY = 1e-9  # least distance: that of a layer which does nothing is zero, or rounding
_LITTLE = 1e-3  # nats; smaller differences of the loss are not told apart


@dataclass(frozen=True)
class SearchCost:
    """The cost of part of a forward, in forwards of the dense model: its share of the parameters that multiply.

    `layers` is the share of all `number` layers together; the head has the rest. The scoring windows hold `scoring`
    times the tokens of the check windows.
    """

    layers: float
    number: int
    scoring: float

    @classmethod
    def of(cls, checking: Reading, scoring: Reading) -> SearchCost:
        inside = sum(p.numel() for p in checking.structure.layers.parameters())
        return cls(
            inside / (inside + checking.scorer.head.weight.numel()),
            checking.structure.num_layers,
            scoring.batch.ids.numel() / checking.batch.ids.numel(),
        )

    @property
    def head(self) -> float:
        return 1 - self.layers

    def without(self, removed: Sequence[int], entry: int) -> float:
        """A forward that starts at layer `entry`, skips `removed` and ends at the loss."""
        run = self.number - entry - sum(layer >= entry for layer in removed)
        return self.layers * run / self.number + self.head

    def mending(self, removed: Layers, held: float) -> float:
        """An upper bound for `fit_mends` of `removed` on the scored windows, a share `held` of which chooses.

        It takes two passes through the layers, and for every gap its trials from the layer before the gap on.
        """
        befores = [layer - 1 for layer in removed if layer - 1 not in removed]
        trials = sum(self.without(removed, before) for before in befores)
        return self.scoring * (2 * self.layers + held * TRIALS * trials)


class Source(NamedTuple):
    """A measurement and the sets it proposes: its cost for `remove` layers, and how the sets are found.

    What is measured is kept with the reading, for searches of other numbers of layers.
    """

    cost: Callable[[SearchCost, int], float]
    sets: Callable[[Reading, int, Layers, int], dict[str, Layers]]


def _by_profile(reading: Reading, remove: int, free: Layers, batch_size: int) -> dict[str, Layers]:
    profile = reading.once(
        "profile", lambda: profile_layers(reading.decoder, reading, seeds=_SEEDS, batch_size=batch_size)
    )
    contraction, bi = profile.contraction, profile.influence.influence[list(free)]
    sets: dict[str, Layers] = {}
    if not contraction.above_floor.any():  # every ρ is rounding: nothing to propose
        return sets
    for pooling in get_args(Pooling):
        rho = contraction.pooled(pooling).rho[list(free)]  # a blend is scaled over the layers that may be removed
        for criterion in ("rho", "blend"):
            made = CRITERIA.make(criterion)
            assert isinstance(made, Scored)
            sets[f"{criterion} ({pooling})"] = least(made.score({"rho": rho, "bi": bi}), remove, free)
    return sets


def end_turns(reading: Reading, batch_size: int) -> np.ndarray:
    """How far the final state turns without each layer, (L,): sums over the positions of few tokens."""
    few = reading.once("few", lambda: _few(reading))
    every = tuple(range(reading.structure.num_layers))
    turns: np.ndarray = few.once("turns", lambda: _added_turns(few, (), every, batch_size))
    return turns


def _by_growth(reading: Reading, remove: int, free: Layers, batch_size: int) -> dict[str, Layers]:
    """The set that grows by the layer without which the final state turns least, beside those that are gone.

    Every layer is tried once (`end_turns`). Then a step tries again the `_RETRIED` that added least to the turn when
    last tried, and the neighbours of the layers that are gone, where what a layer adds changes most. No layer is added
    where each leaves no finite state.
    """
    few = reading.once("few", lambda: _few(reading))
    gone, added = few.once(("grown", free), lambda: (list[int](), end_turns(reading, batch_size).copy()))
    for step in track(range(len(gone), remove), "layers that turn the final state least"):
        tried = left = tuple(layer for layer in free if layer not in gone)
        if step:
            beside = (layer for layer in left if {layer - 1, layer + 1} & {*gone})
            tried = tuple(sorted({*least(added[list(left)], _RETRIED, left), *beside}))
            added[list(tried)] = _added_turns(few, gone, tried, batch_size)
        turns = added[list(tried)]
        if not np.isfinite(turns).any():
            return {}
        gone += least(turns, 1, tried)
    return {GROWN: tuple(sorted(gone[:remove]))}


def _few(reading: Reading) -> Reading:
    batch = reading.batch.take(range(0, len(reading.batch), _FEW))
    return replace(reading, batch=replace(batch, ids=batch.ids[:, : max(2, batch.context // _FEW)]))


def _added_turns(reading: Reading, gone: Sequence[int], tried: Layers, batch_size: int) -> np.ndarray:
    """What each of `tried` adds to the turn of the final state if it goes beside `gone`: a sum over the positions.

    The turn is `1 − cos` of the final states with and without the layers.
    """
    changes = [(layer, partial(reading.prefix.without, (layer,))) for layer in tried]

    @torch.no_grad()
    def turns(first: int, ids: torch.Tensor) -> np.ndarray:
        dense = reading.once(("final", first), lambda: predicting(final_state(reading.structure, ids)))
        with reading.prefix.without(gone):
            before, afters = changed_finals(reading, ids, changes)
        return np.array([float(turn(dense, state)[0].sum()) for state in (before, *afters)])

    before, *afters = np.sum(dealt(reading, batch_size, turns, ""), axis=0)
    return np.array(afters) - before


def _growth_cost(cost: SearchCost, remove: int) -> float:
    """Dense, once more and from every layer on; at each further step as many trials as there are beside one gap.

    A step passes through the layers that are left, and each of its trials through half of them on the mean.
    """
    first = 2 + (cost.number - 1) / 2
    left = 1 - np.arange(1, remove) / cost.number
    return cost.layers * (first + float(left.sum()) * (1 + (_RETRIED + 2) / 2)) / _FEW**2


def _by_divergence(reading: Reading, remove: int, free: Layers, batch_size: int) -> dict[str, Layers]:
    variance = reading.once("kl", lambda: skip_divergence(reading.model, reading, batch_size=batch_size)).variance
    return {"kl": least(variance[list(free)], remove, free)}


GROWN = "grown"
# In the order in which they are measured.
SOURCES: dict[str, Source] = {
    GROWN: Source(_growth_cost, _by_growth),
    "rho": Source(lambda cost, remove: cost.layers * (2 + len(_SEEDS)), _by_profile),
    "kl": Source(lambda cost, remove: (cost.number + 1) * (cost.layers / 2 + cost.head), _by_divergence),
}


def by_direction(distance: np.ndarray, remove: int, free: Layers) -> dict[str, Layers]:
    """The sets by the distances of `AngularDistance`: single layers, one run, and several runs."""
    sets = {"bi": least(distance.diagonal(1)[list(free)], remove, free)}
    for runs, name in ((1, "angular"), *((runs, f"{runs} runs") for runs in _RUNS)):
        nearest = nearest_runs(distance, remove, free, runs)
        if nearest is not None:
            sets[name] = nearest
    return sets


def least(scores: np.ndarray, remove: int, free: Layers) -> Layers:
    """The `remove` layers of `free` with the smallest scores; the earlier layer of equal ones, NaN last."""
    return tuple(sorted(free[i] for i in np.argsort(scores, kind="stable")[:remove]))


def nearest_runs(distance: np.ndarray, remove: int, free: Layers, runs: int) -> Layers | None:
    """`remove` layers in at most `runs` runs with the least `Σ distance[begin, end]`; None if `free` has no such runs.

    `distance` (L + 1, L + 1) is between the boundaries of layers (`AngularDistance`). At least one layer lies between
    two runs, since runs that touch are one. Dynamic programming over the layers finds the minimum.
    """
    size = len(distance) - 1
    allowed = [layer in free for layer in range(size)]
    # best[k, n] at layer l: the least sum of k runs with n layers in total that end before l, and those runs.
    none: tuple[float, Layers] = (np.inf, ())
    best = [{(0, 0): (0.0, ())} for _ in range(size + 2)]
    for end in range(1, size + 1):
        best[end] = dict(best[end - 1])
        for begin in range(end - 1, max(-1, end - 1 - remove), -1):
            if not allowed[begin]:
                break
            before = best[max(begin - 1, 0)]
            for (k, n), (total, chosen) in before.items():
                key = (k + 1, n + end - begin)
                if key[0] > runs or key[1] > remove:
                    continue
                value = (total + float(distance[begin, end]), (*chosen, *range(begin, end)))
                if value[0] < best[end].get(key, none)[0]:
                    best[end][key] = value
    found = [best[size][k, remove] for k in range(1, runs + 1) if (k, remove) in best[size]]
    return min(found)[1] if found else None


def swaps(current: Layers, free: Layers, losses: Mapping[Layers, float], turn_of: TurnOf) -> Iterator[Layers]:
    """The sets one swap away from `current` that have no loss yet, the most promising first."""
    sets = [tuple(sorted({*current, goes} - {stays})) for stays in current for goes in free if goes not in current]
    sets = [layers for layers in sets if layers not in losses]
    yield from (sets[i] for i in np.argsort(_expected(sets, losses, turn_of), kind="stable"))


def _expected(sets: Sequence[Layers], losses: Mapping[Layers, float], turn_of: TurnOf) -> np.ndarray:
    """Predict the log of the loss above dense of `sets` from the `losses` above dense of the sets that were tried.

    The model is `log loss ≈ c + w · members + log turn_of(set)`, fitted by ridge regression with one weight w per
    layer: the weights learn from the tried sets what the turns miss.
    """
    known = {layers: np.log(max(loss, _LITTLE)) for layers, loss in losses.items() if np.isfinite(loss)}

    def described(some: Sequence[Layers]) -> tuple[np.ndarray, np.ndarray]:
        members = np.zeros((len(some), 1 + max(layer for layers in (*known, *sets) for layer in layers)))
        for row, layers in zip(members, some, strict=True):
            row[list(layers)] = 1
        return members, np.log([max(turn_of(layers), _TINY) for layers in some])

    members, base = described(list(known))
    off = np.array(list(known.values())) - base
    weights = np.linalg.solve(members @ members.T + _RIDGE * np.eye(len(known)), off - off.mean())
    others, theirs = described(sets)
    return theirs + others @ (members.T @ weights)


def turn_at_the_end(turns: np.ndarray, layers: Layers) -> float:
    """The sum of `turns` (`end_turns`) over `layers`; one that is not finite counts as the largest."""
    return float(np.where(np.isfinite(turns), turns, turns[np.isfinite(turns)].max(initial=1.0))[list(layers)].sum())


def turn_on_the_way(distance: np.ndarray, layers: Layers) -> float:
    """`Σ distance[begin, end]` over the runs of `layers`."""
    begins = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer + 1 for layer in layers if layer + 1 not in layers]
    return float(distance[begins, ends].sum())
