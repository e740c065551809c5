"""The amount of compression of each matrix of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.plain import find_projections
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import identify
from lyapunov_prune.results.arrays import require_array, require_fitting
from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result

Unit = Literal["sparsity", "rank", "bits"]
DENSE = 16  # the bits that stand for a matrix left as it is


@dataclass(frozen=True)
class Allocation(Result):
    """The compression of every matrix: `amount` (M,) float64, in the order of the model.

    `unit` is `sparsity` (share of the entries set to zero) or `bits` (per weight). The mean weighted by `sizes`
    (numbers of entries) is the budget. Embeddings and head do not count.
    """

    schedule: str
    unit: Unit
    budget: float
    names: Annotated[tuple[str, ...], Per("matrix")]
    layers: Annotated[tuple[int, ...], Per("matrix", below="layer")]
    sizes: Annotated[tuple[int, ...], Per("matrix", least=1)]
    amount: Annotated[np.ndarray, Per("matrix")]
    parameters: dict[str, float | str]
    model: ModelIdentity
    measured_on: tuple[MeasuredOn, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        most = {"sparsity": 1.0, "rank": np.inf, "bits": 16.0}[self.unit]
        require_fitting(len(set(self.names)) == len(self.names) > 0, "an allocation names every matrix once")
        require_array("allocation, amount", self.amount, (len(self.names),), most=most)

    def require_model(self, model: PreTrainedModel) -> None:
        """Raise LyapunovPruneError unless these are the matrices of `model`."""
        matrices = Matrices.of(model)
        own = (self.names, self.layers, self.sizes)
        theirs = (tuple(p.name for p in matrices.projections), tuple(matrices.layers), tuple(matrices.sizes))
        matrices.model.require(self.model, "this allocation", "allocate for this model")
        if own != theirs:
            raise LyapunovPruneError(f"this allocation is of other matrices of {self.model.name}; allocate again")

    def of(self, name: str) -> float:
        """The amount of one matrix; raises LyapunovPruneError for an unknown name."""
        if name not in self.names:
            raise LyapunovPruneError(f"{self.model.name} has no matrix {name!r}; give one of the allocation's names")
        return float(self.amount[self.names.index(name)])

    @property
    def mean(self) -> float:
        """`Σ size · amount / Σ size`: the budget, up to rounding (1e-12)."""
        return float(np.average(self.amount, weights=self.sizes))

    def by_layer(self) -> np.ndarray:
        """The mean amount of each layer weighted by size, (L,) float64; NaN for a layer without matrices."""
        L = self.model.num_layers
        total = np.bincount(self.layers, self.sizes, L)
        means = np.full(L, np.nan)
        return np.divide(np.bincount(self.layers, self.amount * self.sizes, L), total, out=means, where=total > 0)

    def to_frame(self) -> pd.DataFrame:
        """One row per matrix."""
        return pd.DataFrame({"layer": self.layers, "matrix": self.names, "entries": self.sizes, self.unit: self.amount})

    def summary(self) -> pd.DataFrame:
        """One row per layer: mean weighted by size, minimum and maximum over its matrices."""
        rows = self.to_frame().groupby("layer")
        ends = rows[self.unit].agg(["min", "max"])
        return pd.DataFrame(
            {
                "layer": list(ends.index),
                "entries": rows["entries"].sum().to_numpy(),
                self.unit: self.by_layer()[list(ends.index)],
                "least": ends["min"].to_numpy(),
                "most": ends["max"].to_numpy(),
            }
        )

    def headline(self) -> str:
        given = "".join(
            f", {name} {value}" if isinstance(value, str) else f", {name} {value:g}"
            for name, value in self.parameters.items()
        )
        return f"{self.schedule}{given}: {self.unit} {self.budget:g} over {self.model.name}"


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model's layers as arrays with one value per matrix, (M,)."""

    projections: tuple[Projection, ...]
    layers: np.ndarray  # int
    sizes: np.ndarray  # entries, int
    model: ModelIdentity

    @classmethod
    def of(cls, model: PreTrainedModel) -> Matrices:
        projections = find_projections(wrap(model))
        return cls(
            projections=projections,
            layers=np.array([p.layer for p in projections]),
            sizes=np.array([p.weight(model).numel() for p in projections]),
            model=identify(model),
        )

    def layer_sum(self, values: np.ndarray) -> np.ndarray:
        """For every matrix, the sum of `values` over the matrices of its layer, (M,) float64."""
        return np.bincount(self.layers, values)[self.layers]

    def allocated(
        self,
        schedule: str,
        budget: float,
        amount: np.ndarray,
        parameters: Mapping[str, float | str],
        measured_on: tuple[MeasuredOn, ...] = (),
        unit: Unit = "sparsity",
    ) -> Allocation:
        """The `Allocation` of `amount` (M,)."""
        return Allocation(
            schedule=schedule,
            unit=unit,
            budget=float(budget),
            names=tuple(p.name for p in self.projections),
            layers=tuple(map(int, self.layers)),
            sizes=tuple(map(int, self.sizes)),
            amount=amount,
            parameters={n: x if isinstance(x, str) else float(x) for n, x in parameters.items()},
            model=self.model,
            measured_on=measured_on,
        )
