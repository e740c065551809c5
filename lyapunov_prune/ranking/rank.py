"""One call for every criterion: what it goes by is measured, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.forward.sublayers import find_sublayers
from lyapunov_prune.models.streamed import stream_of
from lyapunov_prune.models.structure import identify, in_eval_mode
from lyapunov_prune.predictions.divergence import skip_divergence, sublayer_divergence
from lyapunov_prune.profiles.contraction import require_above_rounding
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.profiles.profile import HOW, LayerProfile, profile_layers
from lyapunov_prune.profiles.propagation import listed
from lyapunov_prune.profiles.sublayer_influence import sublayer_influence
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.best import best_removal
from lyapunov_prune.ranking.counts import count_of, free_layers, protected_layers, require_count
from lyapunov_prune.ranking.criteria import (
    CRITERIA,
    default_criterion,
    require_compares_mended,
    require_criterion,
    require_known_count,
    require_part,
    require_streamed,
    require_temperature_of,
)
from lyapunov_prune.ranking.measured import rank_by_divergence, rank_layers, rank_sublayers
from lyapunov_prune.ranking.oracle import greedy_removal
from lyapunov_prune.ranking.ranking import Ranking, scored
from lyapunov_prune.results.once import once
from lyapunov_prune.results.result import Result


@dataclass(frozen=True)
class _Asked:
    """What `rank` was asked, its batch read."""

    reading: Reading
    criterion: str
    what: str
    alpha: float
    remove: int | None
    seeds: tuple[int, ...]
    seed: int
    batch_size: int
    protect: tuple[int, ...]
    search: float | None
    mend: bool
    judge: TokenBatch | None
    temperature: float
    folder: Path | None
    resume: bool


@checked
@in_eval_mode
def rank(
    model: PreTrainedModel,
    batch: Readable,
    *,
    criterion: str | None = None,
    what: str = "layers",
    alpha: float = 0.5,
    remove: int | float | None = None,
    seeds: Iterable[Seed] = range(4),
    seed: Seed = 0,
    batch_size: int = 1,
    protect: Sequence[int] = (),
    search: float | None = None,
    mend: bool = False,
    judge: TokenBatch | None = None,
    temperature: float = 1.0,
    folder: str | Path | None = None,
    resume: bool = False,
) -> Ranking:
    """Measure on `batch` what a criterion of CRITERIA goes by, and rank the layers of `model` for removal by it.

    `what` goes: whole `layers`, or the `attention` or `mlp` of layers. `remove` says how many, or as a float below 1
    which share; some criteria cannot do without. If no criterion is given, it is `best` where whole layers go and
    `remove` is known, else `bi`; for a streamed model always `bi`. `alpha` is the weight of rho in `blend`, `seeds` are
    those of the perturbations behind rho, `seed` that of `random`. Layers of `protect` stay, counted from the end if
    negative; `search` is what `best` may spend, in forwards. With `mend` it compares sets with their gaps mended too,
    by the text `judge` as well (`best_removal`). `temperature` is that of the predictions behind `kl`. The measurement
    is kept in `folder` under the name that CRITERIA gives it; with `resume` a profile that is there already is taken,
    and an `oracle` or `best` that was interrupted goes on.

    Raises LyapunovPruneError, before anything is measured, for an unknown criterion or part, a criterion that does not
    rank it, must know `remove` or compares nothing mended, one that a streamed model cannot be ranked by, an alpha
    outside [0, 1], a temperature that is not above 0 or not of `kl`, a number of layers that cannot go beside the
    protected, a profile in `folder` of other settings, and (after one window) a dtype in which ρ is rounding; and as
    the measurements.
    """
    streamed = stream_of(model) is not None
    if criterion is None:
        criterion = default_criterion(None if streamed else remove, what)
    require_criterion(criterion, alpha)
    require_part(what, criterion)
    require_known_count(criterion, remove)
    require_temperature_of(criterion, temperature)
    if mend:
        require_compares_mended(criterion)
    reading = read(model, batch, streamed=True)
    if streamed:
        require_streamed(criterion, what)
    if remove is not None:
        remove = count_of(remove, reading.structure.num_layers)
        require_count(remove, reading.structure.num_layers, what)
    protected_layers(reading.structure.num_layers, protect, remove or 1)
    known = CRITERIA[criterion]
    measures = known.measures if what == "layers" else known.of_sublayers
    assert measures is not None  # require_part
    folder = None if folder is None else Path(folder)
    asked = _Asked(
        reading,
        criterion,
        what,
        alpha,
        remove,
        listed(seeds),
        seed,
        batch_size,
        tuple(protect),
        search,
        mend,
        judge,
        temperature,
        folder,
        resume,
    )
    measured, ranking = MEASURES[measures](asked)
    if folder is not None and measured is not None:  # of a ranking that was refused nothing is left
        measured.save(folder / f"{measures}.json")
    return ranking


# Each gives what it measured, if that is still to be kept, and the ranking that follows.
Measured = tuple[Result | None, Ranking]


def _profile(asked: _Asked) -> Measured:
    reading, how = asked.reading, {**HOW, "seeds": asked.seeds}

    def ranked(profile: LayerProfile) -> Ranking:
        by, alpha, protect = asked.criterion, asked.alpha, asked.protect
        return rank_layers(profile.contraction, profile.influence, criterion=by, alpha=alpha, protect=protect)

    def measure() -> LayerProfile:
        require_above_rounding(reading.model, reading)
        profile = profile_layers(reading.model, reading, **how, batch_size=asked.batch_size)
        ranked(profile)  # one that is refused is not kept
        return profile

    if asked.folder is None:
        return None, ranked(measure())
    path = asked.folder / "profile.json"  # the command `profile` writes there too
    origin = reading.measured_on()
    return None, ranked(once(path, LayerProfile, origin, how, measure, resume=asked.resume, shared=True))


def _influence(asked: _Asked) -> Measured:
    measured = block_influence(asked.reading.model, asked.reading, batch_size=asked.batch_size)
    return measured, rank_layers(None, measured, criterion=asked.criterion, protect=asked.protect)


def _sublayers(asked: _Asked) -> Measured:
    measured = sublayer_influence(asked.reading.model, asked.reading, batch_size=asked.batch_size)
    return measured, rank_sublayers(measured, asked.what, protect=asked.protect)


def _divergence(asked: _Asked) -> Measured:
    measured = skip_divergence(
        asked.reading.model,
        asked.reading,
        temperature=asked.temperature,
        batch_size=asked.batch_size,
        folder=asked.folder,
    )
    return measured, rank_by_divergence(measured, protect=asked.protect)


def _sublayer_divergence(asked: _Asked) -> Measured:
    measured = sublayer_divergence(
        asked.reading.model, asked.reading, asked.what, temperature=asked.temperature, batch_size=asked.batch_size
    )
    return measured, rank_by_divergence(measured, protect=asked.protect)


def _angular(asked: _Asked) -> Measured:
    reading = asked.reading
    ranking = angular_distance(
        reading.model, reading, batch_size=asked.batch_size, protect=asked.protect, folder=asked.folder
    )
    return ranking, ranking


def _oracle(asked: _Asked) -> Measured:
    assert asked.remove is not None  # require_known_count
    free = free_layers(asked.reading.structure.num_layers, asked.protect)
    ranking = greedy_removal(
        asked.reading.model,
        asked.reading,
        asked.remove,
        folder=None if asked.folder is None else asked.folder / "jobs" / "oracle",
        resume=asked.resume,
        batch_size=asked.batch_size,
        candidates=lambda removed: set(free) - set(removed),
    )
    return ranking, ranking


def _best(asked: _Asked) -> Measured:
    assert asked.remove is not None  # require_known_count
    ranking = best_removal(
        asked.reading.model,
        asked.reading,
        asked.remove,
        search=asked.search,
        protect=asked.protect,
        mend=asked.mend,
        judge=asked.judge,
        folder=None if asked.folder is None else asked.folder / "jobs" / "best",
        resume=asked.resume,
        batch_size=asked.batch_size,
    )
    return ranking, ranking


def _nothing(asked: _Asked) -> Measured:
    """By position or by lot: nothing is measured but which layers have the part."""
    model, layers = asked.reading.model, asked.reading.structure.num_layers
    layer = np.arange(layers, dtype=np.float64)
    if asked.what != "layers":
        sublayers = find_sublayers(model, range(layers))
        layer[[asked.what not in sublayers[i].branches for i in range(layers)]] = np.nan
    values, identity = {"layer": layer}, identify(model)
    return None, scored(asked.criterion, values, identity, seed=asked.seed, what=asked.what, protect=asked.protect)


# By the names in `Criterion.measures` and `Criterion.of_sublayers`.
MEASURES: dict[str, Callable[[_Asked], Measured]] = {
    "profile": _profile,
    "influence": _influence,
    "sublayers": _sublayers,
    "divergence": _divergence,
    "sublayer-divergence": _sublayer_divergence,
    "angular": _angular,
    "oracle": _oracle,
    "best": _best,
    "": _nothing,
}
