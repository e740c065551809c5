"""Perplexity against the number of layers removed, criterion by criterion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedModel

from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.progress import track
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.pruning.removed import LayersGone
from lyapunov_prune.report.drawing import COLOURS, GREY, labelled, log_axis, one_panel, with_intervals
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class RemovalRow:
    """`degradation = perplexity / dense perplexity`; its interval is paired over windows."""

    criterion: str
    removed: tuple[int, ...]
    perplexity: float
    degradation: float
    low: float
    high: float
    parameters: int


@dataclass(frozen=True)
class RemovalCurve(Result):
    """Perplexity after physical removal by several plans; the dense model is the first row."""

    rows: tuple[RemovalRow, ...]
    measured_on: MeasuredOn

    @property
    def dense(self) -> RemovalRow:
        return self.rows[0]

    def to_frame(self) -> pd.DataFrame:
        frame = pd.DataFrame([vars(row) for row in self.rows])
        frame["layers"] = [" ".join(map(str, row.removed)) for row in self.rows]
        frame["removed"] = [len(row.removed) for row in self.rows]
        return frame

    def headline(self) -> str:
        return self.measured_on.line()


def evaluate_removals(
    model: PreTrainedModel, plans: Mapping[str, list[PruningPlan]], batch: TokenBatch
) -> RemovalCurve:
    """Perplexity of the dense model and of the pruned model of every plan, by criterion.

    Plans that remove the same layers are measured once.
    """
    dense = perplexity(model, batch, description="perplexity, dense")
    rows = [_row("dense", (), dense, dense, model)]
    measured: list[tuple[LayersGone, RemovalRow]] = []
    jobs = [(criterion, plan) for criterion, chosen in plans.items() for plan in chosen]
    for criterion, plan in track(jobs, "removing layers"):
        row = next((row for gone, row in measured if gone == plan.gone), None)
        if row is None:
            pruned = remove_layers(model, plan)
            after = perplexity(pruned, batch, description=f"{criterion}, {len(plan.touched)} removed")
            row = _row(criterion, plan.touched, after, dense, pruned)
            measured.append((plan.gone, row))
            del pruned
        rows.append(replace(row, criterion=criterion))
    return RemovalCurve(tuple(rows), dense.measured_on)


def _row(
    criterion: str, removed: tuple[int, ...], after: Perplexity, dense: Perplexity, model: PreTrainedModel
) -> RemovalRow:
    """The row of `model`, which lacks the `removed` layers, compared with `dense` on the same windows."""
    ratio, low, high = after.value / dense.value, *after.ratio_to(dense)[1:]
    return RemovalRow(criterion, removed, after.value, ratio, low, high, model.num_parameters())


def perplexity_figure(curve: RemovalCurve) -> str:
    """Perplexity over the number of layers removed, one line a criterion, with paired intervals."""
    figure, axes = one_panel(6.5, 3.8)
    dense = curve.dense.perplexity
    axes.axhline(dense, color=GREY, linewidth=0.8, label=f"dense, {dense:.3g}")
    criteria = list(dict.fromkeys(row.criterion for row in curve.rows[1:]))
    for position, criterion in enumerate(criteria):
        rows = sorted((r for r in curve.rows if r.criterion == criterion), key=lambda r: len(r.removed))
        x = np.array([len(r.removed) for r in rows]) + 0.06 * (position - (len(criteria) - 1) / 2)
        y = np.array([r.perplexity for r in rows])
        ends = np.array([[dense * r.low, dense * r.high] for r in rows])
        with_intervals(axes, x, y, ends, marker="o", color=COLOURS.get(criterion), label=criterion)
    log_axis(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return labelled(figure, axes, "layers removed", "perplexity")
