"""One call for every criterion: measure what it needs, and rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lyapunov_prune.arguments import Amount, Count, Positive, Seed, Seeds
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.profiles.propagation import listed
from lyapunov_prune.ranking.counts import What, count_of, protected_layers, require_count
from lyapunov_prune.ranking.criterion import RankingRequest
from lyapunov_prune.ranking.experts import count_of_experts
from lyapunov_prune.ranking.ranking import Ranking
from lyapunov_prune.ranking.table import CRITERIA, default_criterion, require_ranks


@runs_model
def rank(
    model: Streamable,
    batch: Readable,
    *,
    criterion: str | None = None,
    what: What = "layers",
    alpha: float = 0.5,
    remove: Amount | None = None,
    seeds: Seeds = range(4),
    seed: Seed = 0,
    batch_size: Count = 1,
    protect: Sequence[int] = (),
    search: float | None = None,
    mend: bool = False,
    judge: TokenBatch | None = None,
    temperature: Positive = 1.0,
    folder: str | Path | None = None,
    jobs: str | Path | None = None,
) -> Ranking:
    """Measure on `batch` what a criterion of CRITERIA needs, and rank the layers of `model` for removal.

    `what` is removed: whole `layers`, the `attention` of layers, or `experts` of every layer. `remove` is
    their number (for experts: per layer) or, as a float below 1, their share; some criteria need it. The default
    criterion is `best` for whole layers if `remove` is given, `reap` for experts, else `bi`; for a streamed model it is
    always `bi`. `alpha` is the weight of rho in a blend, `seeds` are the seeds of the perturbations behind rho, `seed`
    is that of `random`. Layers of `protect` stay (counted from the end if negative). `search` is the number of forwards
    that `best` may spend. With `mend`, `best` also compares the sets with their gaps mended, on the text `judge` too
    (`best_removal`). `temperature` is that of the predictions behind `kl` and `cosine`. Measurements are saved in
    `folder`, and a profile found there is used. What `oracle` and `best` have measured is kept in `jobs` and not
    measured again. Options that the criterion does not have are ignored, except `mend` and `temperature`, which are
    refused.

    Raises LyapunovPruneError, before anything is measured, for an unknown criterion or part, a criterion that does not
    rank it, must know `remove` or has no `mend`, one that a streamed model cannot be ranked by, an alpha of a blend
    outside [0, 1], a temperature that is not above 0 or that the criterion has no use for, a number of layers that
    cannot go beside the protected, a profile in `folder` of other settings, and (after one window) a dtype in which ρ
    is rounding; and as the measurements.
    """
    streamed = model.stream is not None
    if criterion is None:
        criterion = default_criterion(None if streamed else remove, what)
    given = {"alpha": alpha, "seeds": listed(seeds), "seed": seed, "search": search, "judge": judge}
    options = {option: given[option] for option in CRITERIA[criterion].options() if option in given}
    if mend or "mend" in CRITERIA[criterion].options():
        options["mend"] = mend
    if temperature != 1 or "temperature" in CRITERIA[criterion].options():
        options["temperature"] = temperature
    made = CRITERIA.make(criterion, **options)
    require_ranks(criterion, what, remove=remove, protect=bool(protect), streamed=streamed)
    reading = read(model, batch)
    if what == "experts":
        if remove is not None:
            remove = count_of_experts(reading.decoder.mixtures.router, remove)
    else:
        if remove is not None:
            remove = count_of(remove, reading.structure.num_layers)
            require_count(remove, reading.structure.num_layers, what)
        protected_layers(reading.structure.num_layers, protect, remove or 1)
    folder, jobs = (None if place is None else Path(place) for place in (folder, jobs))
    return made.rank(RankingRequest(reading, what, remove, tuple(protect), batch_size, folder, jobs))
