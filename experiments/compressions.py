"""Perplexity under several compressions of one model, on the same calibration and the same evaluation text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from experiments.statements import interval
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.compression.masks import Pattern
from lyapunov_prune.data.batch import TokenBatch, require_disjoint
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.evaluation.perplexity import Perplexity, interval_of, perplexity
from lyapunov_prune.forward.reading import Reading, read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.progress import track
from lyapunov_prune.report.drawing import COLOURS, GREY, log_axis, one_panel, svg
from lyapunov_prune.results.result import MeasuredOn, Result

Name = tuple[str, str, str, float | None]
ALIKE = "no significant difference"
_POINTS = tuple(zip(COLOURS.values(), "osD^vP", strict=True))


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

    @property
    def name(self) -> Name:
        """What its row is called, which no other setting of a table is."""
        called = self.label or self.method
        if isinstance(self.allocation, Allocation):
            return (called, self.allocation.schedule, self.allocation.unit, self.allocation.budget)
        unit, amount = ("sparsity", self.sparsity) if self.bits is None else ("bits", self.bits)
        return (called, self.allocation, unit, amount)


@dataclass(frozen=True)
class CompressionRow:
    """`degradation = perplexity / dense perplexity`; its 95 % interval is paired over windows.

    `parameters` are those of the schedule; `windows` holds the loss of each window, so that two rows can be compared.
    Both are empty in older files.
    """

    method: str
    allocation: str
    unit: str
    amount: float
    zeros: float
    perplexity: float
    degradation: float
    low: float
    high: float
    parameters: dict[str, float | str] = field(default_factory=dict)
    windows: tuple[float, ...] = ()


@dataclass(frozen=True)
class CompressionTable(Result):
    """What compressions cost; the dense model's perplexity stands in `dense`."""

    dense: float
    rows: tuple[CompressionRow, ...]
    calibration: MeasuredOn
    measured_on: MeasuredOn

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame([vars(row) for row in self.rows]).drop(columns=["parameters", "windows"])

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
    batch_size: int = 1,
    path: Path | None = None,
) -> CompressionTable:
    """Compress `model` in every way of `settings` and measure its perplexity on `evaluation`.

    The table is kept at `path` after every row, and rows that stand there, of this model and these texts, are not
    measured again. Raises LyapunovPruneError when the texts overlap, and as `compress` and `perplexity` do.
    """
    require_disjoint(calibration, evaluation)
    require_unseen(model, evaluation)
    reading = read(wrap(model), calibration)
    dense = perplexity(model, evaluation, batch_size=batch_size, description="perplexity, dense")
    settings = list(settings)
    table = CompressionTable(dense.value, (), reading.measured_on(), dense.measured_on)
    rows = _kept(path, table)
    for setting in track(settings, "compressions"):
        if setting.name not in rows:
            rows[setting.name] = _measured(model, setting, reading, evaluation, dense, batch_size)
            table = replace(table, rows=tuple(rows[s.name] for s in settings if s.name in rows))
            if path is not None:
                table.save(path)
    return replace(table, rows=tuple(rows[s.name] for s in settings))


def _kept(path: Path | None, table: CompressionTable) -> dict[Name, CompressionRow]:
    """The rows at `path` by their names, if it was measured on what `table` is; none of an older version."""
    if path is None or not path.is_file():
        return {}
    kept = CompressionTable.load(path)
    same = _texts(kept) == _texts(table)
    return {(r.method, r.allocation, r.unit, r.amount): r for r in kept.rows if same and r.windows}


def _texts(table: CompressionTable) -> list[MeasuredOn]:
    """What the table was measured on, without what older files do not say."""
    texts = (table.calibration, table.measured_on)
    return [replace(on, fingerprint=None, short=None, model=replace(on.model, settings=None)) for on in texts]


def _measured(
    model: PreTrainedModel,
    setting: Setting,
    reading: Reading,
    evaluation: TokenBatch,
    dense: Perplexity,
    batch_size: int,
) -> CompressionRow:
    done = compress(
        model,
        reading,
        method=setting.method,
        sparsity=setting.sparsity,
        bits=setting.bits,
        allocation=setting.allocation,
        pattern=setting.pattern,
        group_size=setting.group_size,
        batch_size=batch_size,
    )
    found = perplexity(done.model, evaluation, batch_size=batch_size, description=setting.label or setting.method)
    return _row(setting, done.report.allocation, done.report.zeros, found, dense)


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
        *found.ratio_to(dense)[1:],
        allocation.parameters,
        tuple(found.windows.tolist()),
    )


def setting(found: CompressionTable) -> str:
    """What a table was measured on, in sentences."""
    on, calibration = found.measured_on, found.calibration
    return (
        f"{on.line()}; {len(found.rows[0].windows)} windows. Dense perplexity: {found.dense:.4g}.\n"
        f"Calibration: {calibration.tokens} tokens of {calibration.text} "
        f"({calibration.split}, {calibration.text_hash[:12]}).\n"
    )


class Scored(Protocol):
    """What has the loss of each window."""

    @property
    def windows(self) -> Any: ...


def against(row: Scored, other: Scored) -> tuple[float, float, float]:
    """The perplexity of `row` over that of `other` with its 95 % interval, paired by window."""
    losses = np.array(row.windows) - np.array(other.windows)
    return (float(np.exp(losses.mean())), *interval_of(losses))


def told(row: Scored, other: Scored) -> str:
    """What the interval of `against` says of `row`."""
    _, low, high = against(row, other)
    return "better" if high < 1 else "worse" if low > 1 else ALIKE


class Ranged(Protocol):
    """What has a 95 % interval of its perplexity over the dense one."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def apart(row: Ranged, other: Ranged) -> str:
    """What can be said of `row` where the losses of windows were not kept: intervals that lie apart are enough.

    Intervals that overlap decide nothing: paired by window the two might differ significantly.
    """
    return "better" if row.high < other.low else "worse" if row.low > other.high else ALIKE


def beside(row: CompressionRow, other: CompressionRow) -> str:
    """`1.24 (1.1–1.4), worse`; no word without a significant difference."""
    word = told(row, other)
    return interval(*against(row, other)) + ("" if word == ALIKE else f", {word}")


def judged(found: str, theirs: str) -> str:
    """What was `told` here against what the paper found; an interval that holds both decides nothing."""
    return "Agrees" if found == theirs else "Not decided" if found == ALIKE else "Differs"


def compressions_figure(table: CompressionTable) -> str:
    """Degradation of every row with its paired interval, in the order of the table; a colour an amount."""
    rows = table.rows
    figure, axes = one_panel(6.5, 1.1 + 0.24 * len(rows))
    amounts = [_amount(row) for row in rows]
    colours = dict(zip(dict.fromkeys(amounts), cycle(_POINTS), strict=False))
    for y, (row, amount) in enumerate(zip(rows, amounts, strict=True)):
        colour, marker = colours[amount]
        bar = np.abs(np.array([[row.low], [row.high]]) - row.degradation)
        axes.errorbar(
            row.degradation,
            y,
            xerr=bar if np.isfinite(bar).all() else None,
            fmt=marker,
            markersize=4,
            capsize=2,
            color=colour,
        )
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(np.arange(len(rows)), _labels(rows, amounts), fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    log_axis(axes, "x")
    axes.set_xlabel(f"perplexity / dense ({table.dense:.3g})")
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    return svg(figure)


def _amount(row: CompressionRow) -> str:
    """How much, in words."""
    words = {"sparsity": f"{100 * row.amount:g} %", "bits": f"{row.amount:g} bits", "rank": f"rank {row.amount:g}"}
    return words[row.unit]


def _labels(rows: Sequence[CompressionRow], amounts: Sequence[str]) -> list[str]:
    """What tells the rows apart, and the amount: a method or schedule that all rows share is left out."""
    shown = [names for names in ([r.method for r in rows], [r.allocation for r in rows]) if len(set(names)) > 1]
    return [", ".join(parts) for parts in zip(*shown, amounts, strict=True)]
