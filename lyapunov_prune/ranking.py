"""Scores of layers or of their branches, the order they give, and the plan that follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lyapunov_prune.arrays import require_array, require_layers
from lyapunov_prune.branch_influence import SublayerInfluence
from lyapunov_prune.contraction import ContractionProfile, floor_note
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.influence import InfluenceProfile
from lyapunov_prune.plan import FIELDS, PruningPlan
from lyapunov_prune.results import MeasuredOn, ModelIdentity, Result
from lyapunov_prune.sublayers import KINDS

CRITERIA = ("rho", "bi", "blend", "from-end", "random")


@dataclass(frozen=True)
class LayerRanking(Result):
    """A score for every layer, (L,) float64; the smallest is removed first.

    `what` goes: whole layers, or their attention or MLP alone. Layers that lack it have no score (NaN). Where the
    scores rest on ρ, `below_floor` holds the layers whose ρ is rounding (`ContractionProfile.below_floor`).
    """

    criterion: str
    alpha: float | None
    scores: np.ndarray
    model: ModelIdentity
    measured_on: tuple[MeasuredOn, ...]
    what: str = "layers"
    below_floor: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        layers = self.model.num_layers
        require_array("ranking, scores", self.scores, (layers,), least=-np.inf, finite=self.what == "layers")
        require_layers("ranking, below_floor", self.below_floor, layers)

    @property
    def order(self) -> tuple[int, ...]:
        """Layers from the first to remove to the last; equal scores keep their order in the model."""
        return tuple(int(i) for i in np.argsort(self.scores, kind="stable") if not np.isnan(self.scores[i]))

    def plan(self, remove: int, period: int = 1) -> PruningPlan:
        """The plan that removes `what` of the `remove` layers of smallest score.

        With a `period`, layers leave by whole periods, aligned with the first layer: those of smallest sum of
        scores. Raises LyapunovPruneError when that is less than one, more than there are, no whole number of
        periods, or would leave no layer.
        """
        if remove < 1:
            raise LyapunovPruneError(f"cannot remove {remove} layers; give 1 or more")
        if self.what != "layers" and remove > len(self.order):
            raise LyapunovPruneError(
                f"cannot leave out the {self.what} of {remove} layers: {self.model.name} has {len(self.order)} "
                "with one to leave out; give fewer"
            )
        chosen: dict[str, tuple[int, ...]] = dict.fromkeys(FIELDS.values(), ())
        chosen[FIELDS[self.what]] = self.order[:remove] if period == 1 else self._periods(remove, period)
        return PruningPlan(
            **chosen,
            criterion=self.criterion,
            alpha=self.alpha,
            scores=self.scores,
            model=self.model,
            measured_on=self.measured_on,
            below_floor=self.below_floor,
        )

    def _periods(self, remove: int, period: int) -> tuple[int, ...]:
        require_periods(remove, len(self.scores), period)
        whole = len(self.scores) // period  # a rest at the end is no period, and stays
        sums = self.scores[: whole * period].reshape(whole, period).sum(1)
        chosen = np.argsort(sums, kind="stable")[: remove // period]
        return tuple(int(p) * period + i for p in chosen for i in range(period))

    def to_frame(self) -> pd.DataFrame:
        order = list(self.order)
        frame = pd.DataFrame({"rank": range(len(order)), "layer": order, "score": self.scores[order]})
        if self.below_floor:
            frame["below_floor"] = np.isin(order, self.below_floor)
        return frame

    def headline(self) -> str:
        blend = f" (alpha {self.alpha:g})" if self.alpha is not None else ""
        what = {"layers": "Layers", "attention": "Attention of the layers", "mlp": "MLPs of the layers"}[self.what]
        note = floor_note(self.below_floor)
        return f"{what} of {self.model.name} by {self.criterion}{blend}, first to remove first{note}"


def require_periods(remove: int, layers: int, period: int) -> None:
    """Raise LyapunovPruneError unless `remove` layers are whole periods and one of them would be left."""
    most = (layers // period - 1) * period
    if remove % period or not 0 < remove <= most:
        choices = ", ".join(map(str, range(period, most + 1, period)[:3])) + (", …" if most > 3 * period else "")
        raise LyapunovPruneError(
            f"{remove} layers are no whole periods: the kinds of these {layers} repeat every {period}; "
            f"give --remove {choices}, or leave out --keep-period"
        )


def rank_layers(
    profile: ContractionProfile | None = None,
    influence: InfluenceProfile | None = None,
    *,
    criterion: str = "blend",
    alpha: float = 0.5,
    seed: int = 0,
) -> LayerRanking:
    """Rank layers for removal.

    | criterion | score, smallest removed first |
    | --- | --- |
    | `rho` | `|ρ_l − 1|` (structural sensitivity, §6.5) |
    | `bi` | Block Influence (ShortGPT) |
    | `blend` | `α · minmax(|ρ − 1|) + (1 − α) · minmax(bi)` |
    | `from-end` | distance from the end |
    | `random` | a permutation drawn from `seed` |

    `rho` follows the pooling of the profile. Raises LyapunovPruneError for an unknown criterion, a
    missing measurement, measurements of two models, a ρ that is not finite, and by `rho` or
    `blend` for a profile whose every ρ lies below the rounding floor.
    """
    if criterion not in CRITERIA:
        raise LyapunovPruneError(f"unknown criterion {criterion!r}; give one of {', '.join(CRITERIA)}")
    if not 0 <= alpha <= 1:
        raise LyapunovPruneError(f"alpha {alpha:g} is outside [0, 1]")
    if profile and influence and not profile.measured_on.model.same_as(influence.measured_on.model):
        raise LyapunovPruneError("the contraction profile and the Block Influence are of two models; measure one")
    source = profile or influence
    if source is None:
        raise LyapunovPruneError("nothing to rank by; give a contraction profile or a Block Influence")
    layers = np.arange(source.measured_on.model.num_layers)

    used: list[MeasuredOn] = []
    below_floor: tuple[int, ...] = ()
    scores: np.ndarray = np.zeros(len(layers))
    if criterion in ("rho", "blend"):
        if profile is None:
            raise LyapunovPruneError(f"criterion {criterion} needs a contraction profile; measure one")
        if not np.isfinite(profile.rho).all():
            layer = int(np.argmin(np.isfinite(profile.rho)))
            raise LyapunovPruneError(
                f"rho of layer {layer} is {profile.rho[layer]:g}, not finite; measure again in float32"
            )
        profile.require_above_floor()
        below_floor = profile.below_floor
        scores = np.abs(profile.rho - 1)
        used.append(profile.measured_on)
    if criterion in ("bi", "blend"):
        if influence is None:
            raise LyapunovPruneError(f"criterion {criterion} needs Block Influence; measure it")
        blended = alpha * _minmax(scores) + (1 - alpha) * _minmax(influence.influence)
        scores = influence.influence if criterion == "bi" else blended
        used.append(influence.measured_on)
    if criterion == "from-end":
        scores = (len(layers) - 1.0) - layers
    if criterion == "random":
        scores = np.random.default_rng(seed).permutation(len(layers)).astype(np.float64)
    return LayerRanking(
        criterion=criterion,
        alpha=alpha if criterion == "blend" else None,
        scores=scores,
        model=source.measured_on.model,
        measured_on=tuple(used),
        below_floor=below_floor,
    )


def rank_sublayers(influence: SublayerInfluence, what: str) -> LayerRanking:
    """Rank the attention or the MLP of every layer by its Block Influence (LLM-Drop, arXiv:2406.15786).

    Raises LyapunovPruneError when `what` is neither `attention` nor `mlp`.
    """
    if what not in KINDS:
        raise LyapunovPruneError(f"a layer has no {what!r} to leave out; give {' or '.join(KINDS)}")
    return LayerRanking(
        criterion="bi",
        alpha=None,
        scores=influence.attention if what == "attention" else influence.mlp,
        model=influence.measured_on.model,
        measured_on=(influence.measured_on,),
        what=what,
    )


def _minmax(x: np.ndarray) -> np.ndarray:
    span = x.max() - x.min()
    return (x - x.min()) / span if span > 0 else np.zeros_like(x)
