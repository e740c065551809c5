"""Both measurements of a model's layers in one result: contraction and Block Influence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lyapunov_prune.arguments import Seed
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.profiles.contraction import Derivative, measure_contraction
from lyapunov_prune.profiles.contraction_profile import ContractionProfile, Pooling
from lyapunov_prune.profiles.influence import InfluenceProfile, block_influence
from lyapunov_prune.profiles.propagation import listed
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.once import once
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class LayerProfile(Result):
    """What `lyapunov-prune profile` writes and `rank --profile` reads.

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


def profile_layers(
    model: PreTrainedModel,
    batch: Readable,
    *,
    epsilon: float = 1e-2,
    seeds: Iterable[Seed] = range(4),
    method: Derivative = "difference",
    pooling: Pooling = "energy",
    batch_size: int = 1,
) -> LayerProfile:
    """`measure_contraction` and `block_influence` on the same tokens."""
    reading = read(model, batch, streamed=True)
    return LayerProfile(
        contraction=measure_contraction(
            model,
            reading,
            epsilon=epsilon,
            seeds=seeds,
            method=method,
            pooling=pooling,
            batch_size=batch_size,
        ),
        influence=block_influence(model, reading, batch_size=batch_size),
    )


# Default parameters of a profile, besides its seeds.
HOW: dict[str, Any] = {"epsilon": 1e-2, "method": "difference", "pooling": "energy"}


def kept_profile(
    path: str | Path,
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    how: Mapping[str, Any] = HOW,
    seeds: Iterable[Seed] = range(2),
    batch_size: int = 1,
    resume: bool = True,
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
        resume=resume,
    )
