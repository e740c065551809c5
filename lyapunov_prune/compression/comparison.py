"""Perplexity under several compressions of one model, on the same calibration and the same evaluation text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.masks import Pattern
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.data.text import require_unseen
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.forward.reading import read
from lyapunov_prune.profiles.contraction import ContractionProfile
from lyapunov_prune.progress import track
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class Setting:
    """One compression to compare: the arguments of `compress`, and how the row is called."""

    method: str
    allocation: str | Allocation = "uniform"
    sparsity: float | None = None
    bits: float | None = None
    pattern: Pattern | None = None
    group_size: int | None = None
    label: str | None = None


@dataclass(frozen=True)
class CompressionRow:
    """`degradation = perplexity / dense perplexity`; its 95 % interval is paired over windows."""

    method: str
    allocation: str
    unit: str
    amount: float
    zeros: float
    perplexity: float
    degradation: float
    low: float
    high: float


@dataclass(frozen=True)
class CompressionTable(Result):
    """What compressions cost; the dense model's perplexity stands in `dense`."""

    dense: float
    rows: tuple[CompressionRow, ...]
    calibration: MeasuredOn
    measured_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame([vars(row) for row in self.rows])

    def headline(self) -> str:
        return (
            f"Perplexity after compression, dense {self.dense:.4g}\n{self.measured_on.line()}\n"
            f"calibration: {self.calibration.tokens} tokens of {self.calibration.text} "
            f"({self.calibration.split}, {self.calibration.text_hash[:12]})"
        )


def evaluate_compressions(
    model: PreTrainedModel,
    settings: Iterable[Setting],
    calibration: TokenBatch,
    evaluation: TokenBatch,
    *,
    profile: ContractionProfile | None = None,
    batch_size: int = 1,
) -> CompressionTable:
    """Compress `model` in every way of `settings` and measure its perplexity on `evaluation`.

    Raises LyapunovPruneError when the texts overlap, and as `compress` and `perplexity` do.
    """
    require_disjoint(calibration, evaluation)
    require_unseen(model, evaluation)
    reading = read(model, calibration)
    dense = perplexity(model, evaluation, batch_size=batch_size, description="perplexity, dense")
    rows = []
    for setting in track(list(settings), "compressions"):
        done = compress(
            model,
            reading,
            method=setting.method,
            sparsity=setting.sparsity,
            bits=setting.bits,
            allocation=setting.allocation,
            profile=profile,
            pattern=setting.pattern,
            group_size=setting.group_size,
            batch_size=batch_size,
        )
        found = perplexity(done.model, evaluation, batch_size=batch_size, description=setting.label or setting.method)
        rows.append(_row(setting, done.report.allocation, done.report.zeros, found, dense))
        del done
    return CompressionTable(dense.value, tuple(rows), reading.measured_on(), dense.measured_on)


def _row(
    setting: Setting, allocation: Allocation, zeros: float, found: Perplexity, dense: Perplexity
) -> CompressionRow:
    return CompressionRow(
        setting.label or setting.method,
        allocation.schedule,
        allocation.unit,
        allocation.budget,
        zeros,
        found.value,
        found.value / dense.value,
        *found.ratio_interval(dense),
    )
