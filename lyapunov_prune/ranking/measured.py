"""Rankings of what was measured before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.sublayers import require_kind
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.influence import InfluenceProfile
from lyapunov_prune.profiles.sublayer_influence import SublayerInfluence
from lyapunov_prune.ranking.criteria import CRITERIA, DEFAULT, require_criterion, require_profiled
from lyapunov_prune.ranking.ranking import LayerRanking, scored
from lyapunov_prune.results.result import MeasuredOn

_REMEDIES = {"rho": "a contraction profile; measure one", "bi": "Block Influence; measure it"}


@checked
def rank_layers(
    profile: ContractionProfile | None = None,
    influence: InfluenceProfile | None = None,
    *,
    criterion: str = DEFAULT,
    alpha: float = 0.5,
    seed: Seed = 0,
    protect: Sequence[int] = (),
) -> LayerRanking:
    """Rank layers for removal by what was measured before; `rank` measures, and knows every criterion.

    | criterion | score, smallest removed first |
    | --- | --- |
    | `rho` | `|ρ_l − 1|` (structural sensitivity, §6.5) |
    | `bi` | Block Influence (ShortGPT) |
    | `blend` | `α · s(|ρ − 1|) + (1 − α) · s(bi)`, `s(x) = (x − median) / IQR` over the layers that may go |
    | `from-end` | distance from the end |
    | `random` | a permutation drawn from `seed` |

    `rho` follows the pooling of the profile. Layers of `protect` (counted from the end if negative) stay. Raises
    LyapunovPruneError for an unknown criterion, a missing measurement, measurements of two models, a ρ that is not
    finite, and by `rho` or `blend` for a profile whose every ρ lies below the rounding floor.
    """
    require_criterion(criterion, alpha)
    require_profiled(criterion)
    if profile and influence and not profile.measured_on.model.same_as(influence.measured_on.model):
        raise LyapunovPruneError("the contraction profile and the Block Influence are of two models; measure one")
    source = profile or influence
    if source is None:
        raise LyapunovPruneError("nothing to rank by; give a contraction profile or a Block Influence")
    values: dict[str, np.ndarray] = {}
    drawn: dict[str, np.ndarray | None] = {}
    used: list[MeasuredOn] = []
    below_floor: tuple[int, ...] = ()
    if "rho" in CRITERIA[criterion].needs and profile is not None:
        if not np.isfinite(profile.rho).all():
            layer = int(np.argmin(np.isfinite(profile.rho)))
            raise LyapunovPruneError(
                f"rho of layer {layer} is {profile.rho[layer]:g}, not finite; measure again in float32"
            )
        profile.require_above_floor()
        below_floor = profile.below_floor
        values["rho"], drawn["rho"] = profile.rho, profile.drawn()
        used.append(profile.measured_on)
    if "bi" in CRITERIA[criterion].needs and influence is not None:
        values["bi"], drawn["bi"] = influence.influence, influence.drawn()
        used.append(influence.measured_on)
    for name in CRITERIA[criterion].needs:
        if name in _REMEDIES and name not in values:
            raise LyapunovPruneError(f"criterion {criterion} needs {_REMEDIES[name]}")
    on = source.measured_on.model
    ranking = scored(criterion, values, on, tuple(used), alpha=alpha, seed=seed, protect=protect, drawn=drawn)
    return replace(ranking, below_floor=below_floor)


@checked
def rank_sublayers(influence: SublayerInfluence, what: str, *, protect: Sequence[int] = ()) -> LayerRanking:
    """Rank the attention or the MLP of every layer by its Block Influence (LLM-Drop, arXiv:2406.15786).

    Raises LyapunovPruneError when `what` is neither `attention` nor `mlp`.
    """
    require_kind(what)
    values = influence.attention if what == "attention" else influence.mlp
    on = influence.measured_on
    return scored(
        "bi", {"bi": values}, on.model, (on,), what=what, protect=protect, drawn={"bi": influence.drawn(what)}
    )


@checked
def rank_by_divergence(measured: SkipDivergence, *, protect: Sequence[int] = ()) -> LayerRanking:
    """Rank layers, or their attention or MLP, by `variance`, smallest removed first (criterion `kl`).

    Raises LyapunovPruneError when a layer has no finite score.
    """
    part = measured.what if isinstance(measured, SublayerDivergence) else "layers"
    on = measured.measured_on
    return scored("kl", {"variance": measured.variance}, on.model, (on,), what=part, protect=protect)
