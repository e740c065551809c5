"""Rankings from earlier measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lyapunov_prune.arguments import Seed, checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.anatomy import Kind
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.influence import InfluenceProfile, SublayerInfluence
from lyapunov_prune.ranking.criterion import Scored
from lyapunov_prune.ranking.ranking import LayerRanking
from lyapunov_prune.ranking.table import CRITERIA, DEFAULT, require_ranks


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
    """Rank layers for removal by earlier measurements; `rank` measures itself, and knows every criterion.

    | criterion | score, smallest removed first |
    | --- | --- |
    | `rho` | `|ρ_l − 1|` (structural sensitivity, §6.5) |
    | `bi` | Block Influence (ShortGPT) |
    | `blend` | `α · s(|ρ − 1|) + (1 − α) · s(bi)`, `s(x) = (x − median) / IQR` over the layers that may go |
    | `blend-minmax` | the same with `s(x) = (x − min) / (max − min)`, as in the paper |
    | `from-end` | distance from the end |
    | `random` | a permutation drawn from `seed` |

    `rho` follows the pooling of the profile. Layers of `protect` (counted from the end if negative) stay. Raises
    LyapunovPruneError for an unknown criterion, a missing measurement, measurements of two models, a ρ that is not
    finite, and by `rho` or a blend for a profile whose every ρ lies below the rounding floor.
    """
    require_ranks(criterion, profiled=True)
    if profile and influence:
        influence.measured_on.model.require(profile.measured_on.model, "the contraction profile")
    given = {"alpha": alpha, "seed": seed}
    options = {option: given[option] for option in CRITERIA[criterion].options() if option in given}
    return _scored(criterion, **options).of_profiles(profile, influence, protect)


@checked
def rank_sublayers(influence: SublayerInfluence, what: Kind, *, protect: Sequence[int] = ()) -> LayerRanking:
    """Rank the attention or the MLP of every layer by its Block Influence (LLM-Drop, arXiv:2406.15786).

    Raises LyapunovPruneError when `what` is neither `attention` nor `mlp`.
    """
    values = influence.attention if what == "attention" else influence.mlp
    on = influence.measured_on
    drawn = {"bi": influence.drawn(what)}
    return _scored("bi").ranking({"bi": values}, on.model, (on,), what=what, protect=protect, drawn=drawn)


@checked
def rank_by_divergence(measured: SkipDivergence, *, criterion: str = "kl", protect: Sequence[int] = ()) -> LayerRanking:
    """Rank layers, or their attention or MLP, by `variance` (`kl`) or `variance_r` (`cosine`), smallest removed first.

    Raises LyapunovPruneError for another criterion, and when a layer has no finite score.
    """
    part = measured.what if isinstance(measured, SublayerDivergence) else "layers"
    on = measured.measured_on
    values = {"variance": measured.variance, "variance_r": measured.variance_r}
    made = CRITERIA.make(criterion)
    if not (isinstance(made, Scored) and set(made.needs) <= set(values)):
        raise LyapunovPruneError(f"criterion {criterion} goes by no divergence; give kl or cosine")
    return made.ranking(values, on.model, (on,), what=part, protect=protect)


def _scored(criterion: str, **options: Any) -> Scored:
    made = CRITERIA.make(criterion, **options)
    assert isinstance(made, Scored)
    return made
