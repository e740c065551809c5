"""Both measurements of a model's layers in one result: contraction and Block Influence."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lyapunov_prune.arguments import Count, Seeds
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import Model, Streamable, takes_model
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling, dtype_note
from lyapunov_prune.profiles.influence import InfluenceProfile, block_influence
from lyapunov_prune.profiles.propagation import listed
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import ROWS, MeasuredOn, Result
from lyapunov_prune.results.store import once
from lyapunov_prune.results.wording import bars, layers_of

KEEP = 4.0  # a layer above this multiple of the median Block Influence is kept


@dataclass(frozen=True)
class LayerProfile(Result):
    """What `lyapunov-prune profile` writes and `rank` reads.

    Raises LyapunovPruneError when its parts were measured on two models, on two texts, or in two ways.
    """

    contraction: ContractionProfile
    influence: InfluenceProfile

    def __post_init__(self) -> None:
        # Block Influence is not random, so only contraction has a seed.
        if replace(self.measured_on, seed=None) != replace(self.influence.measured_on, seed=None):
            raise LyapunovPruneError(
                "contraction and Block Influence are of two models or texts; measure both with profile"
            )

    @property
    def measured_on(self) -> MeasuredOn:
        """Metadata of both parts, with the first seed of the contraction."""
        return self.contraction.measured_on

    def to_frame(self) -> pd.DataFrame:
        return self.contraction.to_frame().merge(self.influence.to_frame(), on="layer")

    def headline(self) -> str:
        return self.contraction.headline()

    @property
    def kept(self) -> tuple[int, ...]:
        """Layers to keep: both ends, those that turn the state far more than most, those where poolings disagree."""
        turn = self.influence.influence
        far = np.flatnonzero(turn > KEEP * np.median(turn))
        return tuple(sorted({0, len(turn) - 1, *map(int, far), *self.contraction.pooling_disagrees}))

    @property
    def candidates(self) -> tuple[int, ...]:
        """The eighth of the layers (at least one) with the least influence among those not `kept`, least first."""
        turn = self.influence.influence
        order = [int(i) for i in np.argsort(turn, kind="stable") if i not in self.kept]
        return tuple(order[: max(1, len(turn) // 8)])

    def answer(self) -> list[str]:
        turn = self.influence.influence
        contracting, transitions = self.contraction.contracting
        lines = [
            f"Try to remove first: {layers_of(self.candidates)} (of 0 to {len(turn) - 1}). "
            f"Of those not to keep, {'they turn' if len(self.candidates) > 1 else 'it turns'} the hidden state least "
            f"(Block Influence){self._firmness()}.",
            f"Keep: {layers_of(self.kept)}: the ends, and what turns the state over {KEEP:g} × the median or "
            "carries a token of enormous norm.",
            f"Block Influence by layer: {bars(turn)}",
            f"An error shrinks relative to the state (ρ < 1) in {contracting} of {transitions} layers before the last.",
            *self._disagreement(),
            *self._doubts(),
        ]
        if self.candidates:
            lines.append("These are scores, no losses: only a model without the layers shows what they cost.")
        else:
            lines[0] = "No layer stands out as one to remove."
        return lines

    def following(self) -> str:
        name = shlex.quote(self.measured_on.model.name)
        return f"shrink {name} --remove {len(self.candidates)} -o smaller" if self.candidates else ""

    def _firmness(self) -> str:
        """How often the candidates are chosen in bootstrap samples of the windows; unknown for a single window."""
        draws = self.influence.drawn()
        if draws is None:
            return "; one window cannot say how firmly"
        free = [i for i in range(draws.shape[1]) if i not in self.kept]
        ranks = np.argsort(np.argsort(draws[:, free], axis=1, kind="stable"), axis=1)
        often = (ranks < len(self.candidates)).mean(0)
        least = min((often[free.index(i)] for i in self.candidates), default=1.0)
        return f", {'each ' * (len(self.candidates) > 1)}in at least {least:.0%} of redrawn windows"

    def _disagreement(self) -> list[str]:
        """A warning that names the layers where the two poolings disagree, and why; empty if there are none."""
        where = self.contraction.pooling_disagrees
        if not where:
            return []
        by = {name: self.contraction.pooled(name).rho for name in get_args(Pooling)}
        share = max(self.contraction.sink_state_share[i + 1] for i in where)
        with np.errstate(all="ignore"):
            apart = np.abs(np.log(by["energy"] / by["token"]))
        worst = max(where, key=lambda i: float(apart[i]))
        return [
            f"The poolings disagree at {layers_of(where)} (layer {worst}: ρ {by['energy'][worst]:.2g} by energy, "
            f"{by['token'][worst]:.2g} by token): up to {share:.0%} of the energy sits in one token a window. "
            "A ranking by one pooling alone may remove such a layer at great cost."
        ]

    def _doubts(self) -> list[str]:
        """A warning where ρ is rounding or depends on ε, and where half precision may mislead; empty if neither."""
        doubts = []
        if self.contraction.below_floor:
            doubts.append(f"ρ is rounding at {layers_of(self.contraction.below_floor)} (measure in float32)")
        if self.contraction.not_linear:
            doubts.append(f"ρ is another at ε / 10 at {layers_of(self.contraction.not_linear)} (jvp tells)")
        if half := dtype_note([self.measured_on]):
            doubts.append(half.removeprefix("; "))
        return [f"Doubts: {'; '.join(doubts)}."] if doubts else []

    def brief(self) -> pd.DataFrame:
        """The candidates and the layers to keep, with their influence, ρ and its interval."""
        frame = self.to_frame().set_index("layer")
        rows = [*self.candidates, *self.kept]
        advice = ["try"] * len(self.candidates) + ["keep"] * len(self.kept)
        rho = [name for name in frame.columns if name == "rho" or name.startswith("rho_")]
        shown = frame.loc[rows, ["block_influence", *rho, "low", "high"]].reset_index()
        shown.insert(1, "advice", advice)
        return shown.head(ROWS)


@takes_model
def profile_layers(model: Streamable, batch: Readable, *, batch_size: Count = 1, **how: Any) -> LayerProfile:
    """`measure_contraction`, whose other options are `how`, and `block_influence` on the same tokens."""
    reading = read(model, batch)
    return LayerProfile(
        contraction=measure_contraction(model, reading, batch_size=batch_size, **how),
        influence=block_influence(model, reading, batch_size=batch_size),
    )


# Default parameters of a profile, besides its seeds.
HOW: dict[str, Any] = {"epsilon": 1e-2, "method": "difference", "pooling": "energy"}


def kept_profile(
    path: str | Path,
    model: Model,
    batch: TokenBatch,
    *,
    how: Mapping[str, Any] = HOW,
    seeds: Seeds = range(2),
    batch_size: Count = 1,
) -> LayerProfile:
    """Measure a profile once and keep it at `path`; `how` are the parameters of `profile_layers` besides its seeds.

    Two seeds are half the default: enough for comparisons with other measurements.
    """
    asked = {**how, "seeds": listed(seeds)}
    return once(
        path,
        LayerProfile,
        batch.measured_on(model),
        asked,
        lambda: profile_layers(model, batch, **asked, batch_size=batch_size),
    )
