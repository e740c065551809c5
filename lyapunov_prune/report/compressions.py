"""What compressions cost: perplexity against the dense model's, a row each."""

from __future__ import annotations

import numpy as np

from lyapunov_prune.evaluation.compressions import CompressionTable
from lyapunov_prune.report.drawing import GREY, INK, log_axis, one_panel, svg


def compressions_figure(table: CompressionTable) -> str:
    """Degradation of every row with its paired interval, in the order of the table."""
    rows = table.rows
    figure, axes = one_panel(6.5, 1.1 + 0.24 * len(rows))
    y = np.arange(len(rows))
    value = np.array([r.degradation for r in rows])
    bars = np.abs(np.array([[r.low, r.high] for r in rows]).T - value)
    axes.errorbar(value, y, xerr=None if np.isnan(bars).any() else bars, fmt="o", markersize=4, capsize=2, color=INK)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(y, [f"{r.method}, {r.allocation} {r.amount:g}" for r in rows], fontsize=8)
    axes.invert_yaxis()
    log_axis(axes, "x")
    axes.set_xlabel(f"perplexity / dense ({table.dense:.3g})")
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    return svg(figure)
