"""Perplexity against the number of layers removed, criterion by criterion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from lyapunov_prune.arguments import Count
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import Perplexity, perplexity
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import in_memory
from lyapunov_prune.progress import track
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.pruning.removed import LayersGone
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, MeasuredOn, Result
from lyapunov_prune.results.wording import between, ranges


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

    def answer(self) -> list[str]:
        """The least perplexity for each number of removed layers; for a single set, those cut, mended and healed."""
        removed = self.rows[1:]
        dense = f"{self.dense.perplexity:.4g} dense, on {self.measured_on.tokens} tokens that no score saw"
        counts = sorted({len(row.removed) for row in removed})
        if len(counts) == 1:
            best = min(removed, key=_cost)
            return [
                f"Layers {ranges(best.removed)} removed: perplexity {best.perplexity:.4g} {best.criterion}, {dense}.",
                f"{best.parameters:,} parameters of {self.dense.parameters:,} "
                f"({best.parameters / self.dense.parameters:.1%}).",
                *(_times(row.criterion, row) for row in removed),
            ][:LINES]
        lines = [f"Perplexity {dense}."]
        for count in counts:
            rows = [row for row in removed if len(row.removed) == count]
            best, worst = min(rows, key=_cost), max(rows, key=_cost)
            other = f"; worst {worst.degradation:.3g} × by {worst.criterion}" if _cost(worst) > _cost(best) else ""
            lines.append(f"{_times(f'{count} removed, best by {best.criterion}', best)}{other}")
        return lines[:LINES]


def _cost(row: RemovalRow) -> float:
    return row.degradation if math.isfinite(row.degradation) else math.inf


def _times(what: str, row: RemovalRow) -> str:
    return f"{what}: perplexity {row.perplexity:.4g}, {row.degradation:.3g} × dense ({between(row.low, row.high)})"


def evaluate_removals(
    model: PreTrainedModel,
    plans: Mapping[str, list[PruningPlan]],
    batch: Readable,
    *,
    dense: Perplexity | None = None,
    batch_size: Count = 1,
) -> RemovalCurve:
    """Perplexity of the dense model and of the pruned model of every plan, by criterion.

    Plans that remove the same layers are measured once. If `dense` gives the perplexity of `model` on `batch`, it is
    not measured again. Raises LyapunovPruneError if `dense` is of another model or text.
    """
    reading = read(in_memory(model), batch)
    if dense is None:
        dense = perplexity(model, reading, batch_size=batch_size, description="perplexity, dense")
    elif dense.measured_on != reading.measured_on():
        raise LyapunovPruneError("the dense perplexity belongs to another model or text; leave it out")
    rows = [removal_row("dense", (), dense, dense, model)]
    measured: list[tuple[LayersGone, RemovalRow]] = []
    jobs = [(criterion, plan) for criterion, chosen in plans.items() for plan in chosen]
    for criterion, plan in track(jobs, "removing layers"):
        row = next((row for gone, row in measured if gone == plan.gone), None)
        if row is None:
            pruned = remove_layers(model, plan)
            after = perplexity(
                pruned, reading, batch_size=batch_size, description=f"{criterion}, {len(plan.touched)} removed"
            )
            row = removal_row(criterion, plan.touched, after, dense, pruned)
            measured.append((plan.gone, row))
            del pruned
        rows.append(replace(row, criterion=criterion))
    return RemovalCurve(tuple(rows), dense.measured_on)


def removal_row(
    criterion: str, removed: tuple[int, ...], after: Perplexity, dense: Perplexity, model: PreTrainedModel
) -> RemovalRow:
    """The row of `model`, which lacks the `removed` layers, compared with `dense` on the same windows."""
    return RemovalRow(
        criterion,
        removed,
        after.value,
        after.value / dense.value,
        *after.ratio_to(dense)[1:],
        model.num_parameters(),
    )
