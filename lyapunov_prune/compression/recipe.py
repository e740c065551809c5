"""How the matrices of a model are compressed: a method and an amount for each, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocate import allocate
from lyapunov_prune.allocation.allocation import DENSE, Allocation, Matrices, Unit
from lyapunov_prune.arguments import Count
from lyapunov_prune.calibration.downstream import token_weights
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.asking import require_amount, require_options
from lyapunov_prune.compression.described import described
from lyapunov_prune.compression.grids import require_groups
from lyapunov_prune.compression.masks import Pattern, as_pattern
from lyapunov_prune.compression.method import Method, rank_for
from lyapunov_prune.compression.report import CompressedMatrix, CompressionReport
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError, first_of, named
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import Streamable, runs_model
from lyapunov_prune.models.plain import find_projections, require_weights
from lyapunov_prune.models.projections import Projection, by_layer
from lyapunov_prune.models.roles import LeftAlone, left_alone
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.progress import track

# Called with a projection and its matrix before and after.
Seen = Callable[[Projection, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Recipe:
    """How every matrix of the model of `allocation` is compressed.

    `calibration` is the text that the method is calibrated on; None for one that uses weights alone.
    """

    method: Method
    allocation: Allocation
    projections: tuple[Projection, ...]
    calibration: Reading | None

    @cached_property
    def _wanted(self) -> dict[str, float]:
        return dict(zip(self.allocation.names, self.allocation.amount.tolist(), strict=True))

    @torch.no_grad()
    def apply(
        self,
        model: PreTrainedModel,
        put: Callable[[int], None] = lambda layer: None,
        *,
        seen: Seen | None = None,
        batch_size: Count = 1,
    ) -> CompressionReport:
        """Compress the matrices of `model` in place, layer by layer; `put` is called for each layer while in memory.

        `seen` is called with every matrix before and after, for callers that store more than the matrix.
        """
        matrices = by_layer(self.projections)
        left = dict.fromkeys(range(self.allocation.model.num_layers))
        done: list[CompressedMatrix] = []

        def change(here: Sequence[Projection], statistics: Mapping[str, Statistics]) -> None:
            done.extend(self._changed(p, p.weight(model), statistics.get(p.name), seen) for p in here)
            put(here[0].layer)
            del left[here[0].layer]

        if self.calibration is not None:
            weighted = getattr(self.method, "weighted", False)
            stream(
                model,
                self.calibration,
                self.projections,
                self.method.needs,
                change,
                batch_size=batch_size,
                weights=token_weights(self.calibration, self.projections, batch_size) if weighted else None,
                dense=self._dense_beside(model),
            )
        # The remaining layers have no matrices, or the method uses weights alone.
        for layer in track([*left], f"compression, {self.method.name}"):
            with layer_held(model, layer):
                if layer in matrices:
                    change(matrices[layer], {})
                else:
                    put(layer)
        return self._report(done, left_alone(find_structure(model), self.projections))

    def _changed(
        self, p: Projection, W: torch.Tensor, statistics: Statistics | None, seen: Seen | None
    ) -> CompressedMatrix:
        amount, after = self._amount_of(p, W), W
        if amount is not None:
            with named(p.name):
                after = self.method(W, amount, statistics)
        told = described(p, self.method, W, after, statistics, self._wanted[p.name], amount)
        if seen:
            seen(p, W, after)
        W.copy_(after)
        return told

    def _dense_beside(self, model: PreTrainedModel) -> Reading | None:
        """The dense model's reading if the method corrects for earlier changes, otherwise None."""
        if not getattr(self.method, "correction", 0):
            return None
        if self.calibration is not None and self.calibration.model is model:
            raise LyapunovPruneError("a correction needs the dense model beside the compressed one; load it whole")
        return self.calibration

    def _amount_of(self, p: Projection, W: torch.Tensor) -> float | None:
        return _amount(self.method, self._wanted[p.name], self.allocation.unit, W.shape)

    def _report(self, done: Sequence[CompressedMatrix], alone: tuple[LeftAlone, ...]) -> CompressionReport:
        by_name = {matrix.name: matrix for matrix in done}
        return CompressionReport(
            method=self.method.name,
            pattern=getattr(self.method, "pattern", None),
            group_size=getattr(self.method, "group_size", None),
            symmetric=getattr(self.method, "symmetric", False),
            weighted=getattr(self.method, "weighted", False),
            correction=getattr(self.method, "correction", 0.0),
            allocation=self.allocation,
            matrices=tuple(by_name[p.name] for p in self.projections),
            calibration=None if self.calibration is None else self.calibration.measured_on(),
            left_alone=alone,
        )


@dataclass(frozen=True)
class CompressionRequest:
    """The options of `compress`, which says what they mean."""

    method: str
    sparsity: float | None = None
    rank: int | None = None
    bits: float | None = None
    allocation: str | Allocation = "uniform"
    schedule_options: Mapping[str, Any] | None = None
    pattern: Pattern | str | None = None
    group_size: int | None = None
    symmetric: bool = False
    weighted: bool = False
    correction: float = 0.0

    def made(self, pattern: Pattern | None) -> Method:
        """The method with its options and this parsed `pattern`; raises LyapunovPruneError for one it does not have."""
        names = ("group_size", "symmetric", "weighted", "correction")
        options = {"pattern": pattern, **{name: getattr(self, name) for name in names}}
        return METHODS.make(self.method, **{name: each for name, each in options.items() if each not in (None, False)})


@runs_model
def recipe_for(model: Streamable, batch: Readable | None, asked: CompressionRequest) -> Recipe:
    """The Recipe for the options of `compress`.

    Raises LyapunovPruneError for amounts and options that the method does not have, a rank that changes no matrix, a
    missing text, and matrices shared between layers.
    """
    require_weights(model.model, "unquantised")
    pattern, allocation, sparsity, rank = as_pattern(asked.pattern), asked.allocation, asked.sparsity, asked.rank
    if pattern is not None and sparsity is None and isinstance(allocation, str):
        sparsity = 1 - pattern[0] / pattern[1]
    kind = require_amount(asked.method, sparsity, rank, asked.bits, allocation)
    made = asked.made(pattern)
    require_options(allocation, asked.schedule_options)
    schedule = allocation.schedule if isinstance(allocation, Allocation) else allocation
    wrong = {
        "keeps the same share of every matrix by a pattern; give allocation uniform with it": (
            pattern is not None and schedule != "uniform"
        ),
        "needs calibration text; give a batch, or method magnitude": made.needs != "nothing" and batch is None,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"method {asked.method} {why}")
    given = None if batch is None else read(model, batch)
    if isinstance(allocation, Allocation):
        allocation.require_model(model.model)
    else:
        amount = next(x for x in (sparsity, rank, asked.bits) if x is not None)
        allocation = _allocated(model.model, kind, amount, allocation, asked.schedule_options or {})
    projections = find_projections(model)
    _require_apart(model.model, projections)
    shapes = [p.weight(model.model).shape for p in projections]
    highest = max(map(min, shapes))
    for _, inputs in shapes:
        require_groups(asked.group_size, inputs)
    if rank is not None and rank >= highest:
        raise LyapunovPruneError(f"rank {rank} leaves every matrix as it is; give one below {highest}")
    return Recipe(made, allocation, projections, None if made.needs == "nothing" else given)


def _allocated(
    model: PreTrainedModel, kind: str, amount: float, schedule: str, options: Mapping[str, Any]
) -> Allocation:
    if schedule == "uniform" and kind != "sparsity":
        matrices = Matrices.of(model)
        even = np.full(len(matrices.sizes), float(amount))
        return matrices.allocated("uniform", amount, even, {}, unit=cast(Unit, kind))
    return allocate(model, schedule, amount, **options)


def _amount(method: Method, amount: float, unit: str, shape: Sequence[int]) -> float | None:
    """The amount passed to the method; None for a matrix that is not changed."""
    if unit == "bits":
        return None if amount == DENSE else amount
    if method.unit != "rank":
        return amount if amount > 0 else None
    if unit == "sparsity" and amount == 0:
        return None
    rank = rank_for(shape, amount) if unit == "sparsity" else amount
    return None if rank is None else float(min(rank, *shape))


def _require_apart(model: PreTrainedModel, projections: Sequence[Projection]) -> None:
    """Raise LyapunovPruneError for a matrix that several layers share: it would be compressed once for each."""
    seen: dict[tuple[int, int, int | None], str] = {}
    for p in projections:
        W = p.stored(model)
        first = seen.setdefault((id(W), p.start, p.position), p.name)
        if first != p.name:
            raise LyapunovPruneError(f"{first} and {p.name} are the same matrix; shared layers are not compressed")
