"""What a reader may ask of the page: which layers go by a criterion, how sure that is, and what it is known to cost.

The script (`questions.js`) shows what stands in the data, and computes nothing but sums of the divergences.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.predictions.divergence import SkipDivergence
from lyapunov_prune.profiles.influence import InfluenceProfile
from lyapunov_prune.profiles.profile import LayerProfile
from lyapunov_prune.pruning.curve import RemovalCurve
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.angular import AngularDistance
from lyapunov_prune.ranking.measured import rank_by_divergence, rank_layers
from lyapunov_prune.ranking.oracle import GreedyRemoval
from lyapunov_prune.ranking.ranking import LayerRanking, Ranking
from lyapunov_prune.ranking.table import CRITERIA
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.results.result import ModelIdentity

CUT = "cut"  # removed physically, and nothing else
_PROFILED = ("bi", "blend", "rho")
SCRIPT = (Path(__file__).parent / "questions.js").read_text(encoding="utf-8")
# Nothing is fetched, nothing is sent, and of scripts only this one runs: whatever the names in a result hold is text.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)


def questions(results: Collection[Any], plans: Collection[PruningPlan] = ()) -> dict[str, Any] | None:
    """The data of the section; None where nothing ranks layers.

    `results` are those of the run. What is of another model than the first ranking is left out. The section starts at
    the first of `plans` whose criterion it knows.
    """
    criteria: dict[str, dict[str, Any]] = {}
    known: list[dict[str, Any]] = []
    divergence: list[float | None] | None = None
    sizes: RemovalCurve | None = None
    model: ModelIdentity | None = None
    for result in results:
        on: ModelIdentity | None = getattr(getattr(result, "measured_on", None), "model", None)
        if on is None or (model is not None and not _same(on, model)):
            continue
        found = list(_rankings(result))
        if found:
            model = model or on
        criteria |= {name: _criterion(ranking, on.num_layers) for name, ranking in found}
        if type(result) is SkipDivergence:  # of whole layers, not of their parts
            divergence = [_finite(x) for x in result.variance]
        if isinstance(result, RemovalCurve):
            sizes = sizes or result
        known += [row for row in _known(result) if row not in known]
    if model is None:
        return None
    starts = [{"criterion": p.criterion, "count": len(p.remove)} for p in plans if p.criterion in criteria and p.remove]
    return {
        "model": model.name,
        "command": shlex.quote(model.name),
        "layers": model.num_layers,
        "parameters": model.parameters,
        "layer": None if sizes is None else _layer_size(sizes),
        "criteria": criteria,
        "divergence": divergence,
        "known": known,
        "start": starts[0] if starts else None,
    }


def _same(a: ModelIdentity, b: ModelIdentity) -> bool:
    try:
        return a.same_as(b)
    except LyapunovPruneError:  # dtypes of which none can be rounded to the other
        return False


def _rankings(result: Any) -> Iterable[tuple[str, Ranking]]:
    """What refuses to rank, as scores that are not finite, is shown below and asked nothing."""
    if isinstance(result, LayerProfile):
        for name in _PROFILED:
            with suppress(LyapunovPruneError):
                yield name, rank_layers(result.contraction, result.influence, criterion=name)
    elif isinstance(result, InfluenceProfile):
        with suppress(LyapunovPruneError):
            yield "bi", rank_layers(None, result, criterion="bi")
    elif type(result) is SkipDivergence:
        with suppress(LyapunovPruneError):
            yield "kl", rank_by_divergence(result)
    elif isinstance(result, AngularDistance | GreedyRemoval | BestRemoval):
        yield result.criterion, result


def _criterion(ranking: Ranking, layers: int) -> dict[str, Any]:
    """The sets of 1, 2, … layers as far as the criterion names them, how often each layer is picked, and the scores."""
    sets: dict[int, list[int]] = {}
    picked: dict[int, list[float]] = {}
    scores: list[float | None] | None = None
    if isinstance(ranking, LayerRanking):
        scores = [_finite(x) for x in ranking.scores]
    for count in range(1, layers):
        try:
            plan = ranking.plan(count)
        except LyapunovPruneError:  # one that chooses so many together names no other sets
            continue
        sets[count] = sorted(plan.remove)
        if plan.picked is not None:
            picked[count] = [round(float(x), 3) for x in plan.picked]
    return {"sets": sets, "picked": picked, "scores": scores}


def _known(result: Any) -> list[dict[str, Any]]:
    """Sets of layers whose perplexity was measured, over the dense one of the same text."""
    rows: list[tuple[Collection[int], float, str]] = []
    if isinstance(result, RemovalCurve):  # a row is named by a criterion, or by what became of the cut model
        on = result.measured_on.line()
        names = [CUT if r.criterion in CRITERIA else r.criterion for r in result.rows]
        rows = [(r.removed, r.degradation, f"{name}, {on}") for r, name in zip(result.rows, names, strict=True)]
    elif isinstance(result, GreedyRemoval):
        times = np.exp(result.losses - result.losses[0])
        text = f"on the text that chose it, {result.measured_on.line()}"
        rows = [(result.order[:n], float(x), text) for n, x in enumerate(times)]
    elif isinstance(result, BestRemoval):
        text = f"on the windows that checked it, {result.checked_on.line()}"
        dense = result.dense.mean()
        rows = [(t.layers, float(np.exp(t.windows.mean() - dense)), text) for t in result.tried]
    return [
        {"layers": sorted(layers), "times": value, "text": text, "mended": text.startswith("mended")}
        for layers, value, text in rows
        if layers and math.isfinite(value)
    ]


def _layer_size(curve: RemovalCurve) -> int | None:
    """The parameters of a layer, where every removal took away as many for each."""
    each = {(curve.dense.parameters - row.parameters) / len(row.removed) for row in curve.rows if row.removed}
    size = each.pop() if len(each) == 1 else math.nan
    return int(size) if size == size and size == int(size) else None


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None
