"""One call for every criterion: what it goes by is measured, and ranked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.arguments import checked
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.forward.sublayers import find_sublayers
from lyapunov_prune.models.structure import identify, in_eval_mode
from lyapunov_prune.predictions.divergence import skip_divergence, sublayer_divergence
from lyapunov_prune.profiles.profile import profile_layers
from lyapunov_prune.profiles.sublayer_influence import sublayer_influence
from lyapunov_prune.ranking.angular import angular_distance
from lyapunov_prune.ranking.criteria import (
    CRITERIA,
    require_count,
    require_criterion,
    require_known_count,
    require_part,
)
from lyapunov_prune.ranking.kl import rank_by_divergence
from lyapunov_prune.ranking.oracle import greedy_removal
from lyapunov_prune.ranking.ranking import Ranking, rank_layers, rank_sublayers, scored
from lyapunov_prune.results.result import Result


@checked
@in_eval_mode
def rank(
    model: PreTrainedModel,
    batch: Readable,
    *,
    criterion: str = "blend",
    what: str = "layers",
    alpha: float = 0.5,
    remove: int | None = None,
    seeds: Iterable[int] = range(4),
    seed: int = 0,
    batch_size: int = 1,
    folder: str | Path | None = None,
    resume: bool = False,
) -> Ranking:
    """Measure on `batch` what a criterion of CRITERIA goes by, and rank the layers of `model` for removal by it.

    `what` goes: whole `layers`, or the `attention` or `mlp` of layers. `remove` says how many; some criteria cannot
    do without. `alpha` is the weight of rho in `blend`, `seeds` are those of the perturbations behind rho, `seed` that
    of `random`. The measurement is kept in `folder` under the name that CRITERIA gives it; there an `oracle` that was
    interrupted goes on with `resume`.

    Raises LyapunovPruneError, before anything is measured, for an unknown criterion or part, a criterion that does not
    rank it or must know `remove`, an alpha outside [0, 1], a number of layers that cannot go; and as the measurements.
    """
    require_criterion(criterion, alpha)
    require_part(what, criterion)
    require_known_count(criterion, remove)
    reading = read(model, batch)
    layers = reading.structure.num_layers
    if remove is not None:
        require_count(remove, layers, what)
    known = CRITERIA[criterion]
    measures = known.measures if what == "layers" else known.of_sublayers

    measured: Result
    ranking: Ranking
    match measures:
        case "profile":
            measured = profile = profile_layers(model, reading, seeds=seeds, batch_size=batch_size)
            ranking = rank_layers(profile.contraction, profile.influence, criterion=criterion, alpha=alpha)
        case "sublayers":
            measured = influence = sublayer_influence(model, reading, batch_size=batch_size)
            ranking = rank_sublayers(influence, what)
        case "divergence":
            measured = skipped = skip_divergence(model, reading, batch_size=batch_size)
            ranking = rank_by_divergence(skipped)
        case "sublayer-divergence":
            measured = silenced = sublayer_divergence(model, reading, what, batch_size=batch_size)
            ranking = rank_by_divergence(silenced)
        case "angular":
            measured = ranking = angular_distance(model, reading, batch_size=batch_size)
        case "oracle":
            assert remove is not None
            jobs = None if folder is None else Path(folder) / "jobs" / "oracle"
            measured = ranking = greedy_removal(
                model, reading, remove, folder=jobs, resume=resume, batch_size=batch_size
            )
        case _:
            return _unmeasured(model, layers, criterion, what, seed)
    if folder is not None:  # of a ranking that was refused nothing is left
        measured.save(Path(folder) / f"{measures}.json")
    return ranking


def _unmeasured(model: PreTrainedModel, layers: int, criterion: str, what: str, seed: int) -> Ranking:
    """By position or by lot: nothing is measured but which layers have the part."""
    layer = np.arange(layers, dtype=np.float64)
    if what != "layers":
        sublayers = find_sublayers(model, range(layers))
        layer[[what not in sublayers[i].branches for i in range(layers)]] = np.nan
    return scored(criterion, {"layer": layer}, identify(model), seed=seed, what=what)
