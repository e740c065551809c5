"""A decision as an object: which layers to remove, why, and from which measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import identify
from lyapunov_prune.results import MeasuredOn, ModelIdentity, Result


@dataclass(frozen=True)
class PruningPlan(Result):
    """The layers to remove (ascending), with their reasons.

    `scores` holds the criterion of every layer, smallest removed first; empty when the layers were given
    by hand. Raises LyapunovPruneError when an index is repeated, out of range, or no layer would be left.
    """

    remove: tuple[int, ...]
    criterion: str
    alpha: float | None
    scores: np.ndarray
    model: ModelIdentity
    measured_on: tuple[MeasuredOn, ...]

    def __post_init__(self) -> None:
        layers = self.model.num_layers
        if any(isinstance(i, bool) or not isinstance(i, int | np.integer) for i in self.remove):
            raise LyapunovPruneError(f"layer indices must be integers, got {list(self.remove)}")
        outside = [i for i in self.remove if not 0 <= i < layers]
        if outside:
            raise LyapunovPruneError(
                f"layer {outside[0]} does not exist: {self.model.name} has layers 0 to {layers - 1}"
            )
        repeated = sorted({i for i in self.remove if self.remove.count(i) > 1})
        if repeated:
            raise LyapunovPruneError(f"layer {repeated[0]} is named more than once; name each layer once")
        if not self.remove:
            raise LyapunovPruneError("the plan removes no layer; name one or more")
        if len(self.remove) >= layers:
            raise LyapunovPruneError(
                f"{len(self.remove)} layers to remove and {self.model.name} has {layers}; keep at least one"
            )
        object.__setattr__(self, "remove", tuple(sorted(int(i) for i in self.remove)))

    @classmethod
    def given(cls, model: PreTrainedModel, remove: Sequence[int]) -> PruningPlan:
        """A plan for layers chosen by hand."""
        return cls(
            remove=tuple(remove),
            criterion="given",
            alpha=None,
            scores=np.empty(0),
            model=identify(model),
            measured_on=(),
        )

    @property
    def kept(self) -> tuple[int, ...]:
        """The original index of every layer of the pruned model, in order."""
        return tuple(i for i in range(self.model.num_layers) if i not in self.remove)

    def require_model(self, model: PreTrainedModel) -> None:
        """Raise LyapunovPruneError unless the plan was made for this model."""
        if not self.model.same_as(identify(model)):
            raise LyapunovPruneError(
                f"this plan was made for {self.model.name} ({self.model.model_type}, {self.model.num_layers} layers), "
                f"not for {identify(model).name}; rank this model's layers anew"
            )

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: its score, its rank (0 goes first) and whether it is removed."""
        layers = np.arange(self.model.num_layers)
        frame = pd.DataFrame({"layer": layers, "removed": np.isin(layers, self.remove)})
        if len(self.scores):
            frame.insert(1, "score", self.scores)
            frame.insert(2, "rank", np.argsort(np.argsort(self.scores, kind="stable")))
        return frame

    def headline(self) -> str:
        blend = f" (alpha {self.alpha:g})" if self.alpha is not None else ""
        return (
            f"Remove {len(self.remove)} of {self.model.num_layers} layers of {self.model.name} "
            f"by {self.criterion}{blend}: {', '.join(map(str, self.remove))}"
        )


def as_plan(model: PreTrainedModel, plan: PruningPlan | Sequence[int]) -> PruningPlan:
    """`plan`, or a plan for a plain list of indices; raises LyapunovPruneError unless it fits `model`."""
    if isinstance(plan, PruningPlan):
        plan.require_model(model)
        return plan
    return PruningPlan.given(model, plan)
