"""Figures of evaluation: scores of tasks, and speed."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np

from lyapunov_prune.evaluation.speed import Speed
from lyapunov_prune.evaluation.task_scores import COLLAPSED, REPEATED, TaskScore, TaskScores
from lyapunov_prune.predictions.verdict import wilson
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, SMALL, by_rows, one_panel, svg
from lyapunov_prune.shrinking.report import Shrinking


def speed_figure(speed: Speed) -> str:
    """Tokens or images per second relative to the first model, with quartiles and the numbers on the bars."""
    figure, axes = one_panel(6.5, 0.9 + 0.55 * len(speed.rows))
    first, unit = speed.rows[0], "images/s" if speed.images else "tok/s"
    bars = [(0.0, "prefill", "images", COLOURS["rho"])]
    if not speed.images:
        bars = [(-0.18, "prefill", "prefill", COLOURS["rho"]), (0.18, "decode", "cached decoding", COLOURS["bi"])]
    for offset, phase, label, colour in bars:
        ratios = [getattr(r, phase) / getattr(first, phase) for r in speed.rows]
        quartiles = np.array([getattr(r, f"{phase}_quartiles") for r in speed.rows]).T / getattr(first, phase)
        y = np.arange(len(speed.rows)) + offset
        axes.barh(y, ratios, height=0.34, color=colour, alpha=0.85, label=label)
        axes.errorbar(ratios, y, xerr=np.abs(quartiles - ratios), fmt="none", ecolor=INK, elinewidth=0.8)
        for row, position, edge in zip(speed.rows, y, quartiles[1], strict=True):
            axes.text(edge + 0.015, position, f"{getattr(row, phase):.1f} {unit}", va="center", fontsize=SMALL)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.margins(x=0.22)
    return by_rows(figure, axes, [r.model for r in speed.rows], f"speed, × {first.model}")


def before_after_figure(shrunk: Shrinking) -> str:
    """What the smaller model has of the dense one: parameters, bytes, speed (95 %), perplexities (95 %)."""
    rows: list[tuple[str, float, tuple[float, float] | None, str]] = [
        (name, after / before, None, f"{before / 1e6:,.1f} → {after / 1e6:,.1f} {unit}")
        for name, (before, after), unit in (("parameters", shrunk.parameters, "M"), ("weights", shrunk.size, "MB"))
    ]
    if shrunk.evaluation.speed is not None:
        last = shrunk.evaluation.speed.rows[-1]
        for name, ratio in (("reading", last.prefill_ratio), ("writing", last.decode_ratio)):
            if ratio is not None:
                told = "machine busy" if ratio.busy else f"× {ratio.value:.2f}"
                value = np.nan if ratio.busy else ratio.value
                rows.append((name, value, (ratio.low, ratio.high), told))
    for pair in filter(None, (shrunk.evaluation.perplexities, shrunk.foreign)):
        dense, smaller = pair
        worth, name = f"{dense.value:.4g} → {smaller.value:.4g}", f"perplexity, {Path(dense.measured_on.text).name}"
        rows.append((name, smaller.value / dense.value, smaller.ratio_to(dense)[1:], worth))
    figure, axes = one_panel(6.5, 1 + 0.4 * len(rows))
    for y, (name, value, interval, told) in enumerate(rows):
        low, high = interval or (value, value)
        if not np.isfinite([value, low, high]).all():  # what is not finite has no bar
            value = low = high = 0.0
        axes.barh(y, value, height=0.6, color=COLOURS["bi" if name.startswith("perplexity") else "rho"], alpha=0.85)
        axes.plot([low, high], [y, y], color=INK, linewidth=0.8)
        axes.text(high + 0.02, y, told, va="center", fontsize=SMALL)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.margins(x=0.35)
    return by_rows(figure, axes, [row[0] for row in rows], "the smaller model, × the dense one")


# Metrics that are shares of the items, before the comma of a filter; others stand in the table alone.
_SHARES = ("acc", "acc_norm", "exact_match", COLLAPSED, REPEATED)


def tasks_figure(scores: TaskScores) -> str:
    """Every share with its 95 % interval; dotted where guessing would be."""
    tasks = {task.name: task for task in scores.tasks}
    shares = [s for s in scores.scores if s.metric.partition(",")[0] in _SHARES]
    # Multiple choice comes first, so that generation is read against it.
    rows = sorted(dict.fromkeys((s.task, s.metric) for s in shares), key=lambda row: tasks[row[0]].kind == "generation")
    figure, axes = one_panel(7.5, 1.0 + (0.22 + 0.16 * len(scores.models)) * len(rows))
    height = 0.8 / len(scores.models)
    for i, (model, colour) in enumerate(zip(scores.models, cycle(COLOURS.values()), strict=False)):
        by_row = {(s.task, s.metric): s for s in shares if s.model == model}
        values = np.array([100 * by_row[row].value for row in rows])
        bars = [100 * np.array(_interval(by_row[row], tasks[row[0]].items)) for row in rows]
        y = np.arange(len(rows)) + height * (i - (len(scores.models) - 1) / 2)
        axes.barh(y, values, height=0.9 * height, color=colour, alpha=0.85, label=model)
        axes.errorbar(
            values, y, xerr=np.abs(np.transpose(bars) - values), fmt="none", ecolor=INK, elinewidth=0.8, capsize=2
        )
    label: str | None = "guessing"
    for row, (task, metric) in enumerate(rows):
        if metric.startswith("acc") and np.isfinite(tasks[task].chance):
            axes.plot(
                [100 * tasks[task].chance] * 2, [row - 0.45, row + 0.45], ":", color=INK, linewidth=1.2, label=label
            )
            label = None
    split = sum(tasks[task].kind != "generation" for task, _ in rows)
    if 0 < split < len(rows):
        axes.axhline(split - 0.5, color=GREY, linewidth=0.8)
    axes.set_yticks(np.arange(len(rows)), [f"{task}: {metric}" for task, metric in rows], fontsize=SMALL)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of items (of 3-grams, where they are named), %")
    axes.legend(frameon=False, fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return svg(figure)


def _interval(score: TaskScore, items: int) -> tuple[float, float]:
    """Wilson's interval where an item is right or wrong: 1.96 standard errors are nothing at 0 and 1."""
    if score.metric == REPEATED:
        return score.value - 1.96 * score.error, score.value + 1.96 * score.error
    return wilson(score.value, items)
