"""Figures of compression: the perplexity of several against the dense model's, and the errors of one by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from lyapunov_prune.compression.comparison import CompressionRow, CompressionTable
from lyapunov_prune.compression.compress import CompressionReport
from lyapunov_prune.report.drawing import COLOURS, GREY, depth_axis, log_axis, one_panel, panels, svg

_POINTS = tuple(zip(COLOURS.values(), "osD^vP", strict=True))


def compression_figure(report: CompressionReport) -> str:
    """Above: how much of each layer. Below: the relative errors of its matrices, points, and their mean, lines."""
    figure, (amounts, errors) = panels(9, 5.0, 2)
    matrices, layers = report.to_frame(), report.summary()
    unit = report.allocation.unit
    amounts.bar(layers["layer"], layers[unit], width=0.7, color=COLOURS["from-end"])
    amounts.set_ylabel({"bits": "bits a weight"}.get(unit, unit))
    for name, label, marker, colour in (
        ("weight_error", "weights, ‖W − Ŵ‖ / ‖W‖", "o", COLOURS["rho"]),
        ("output_error", "outputs, ‖(W − Ŵ) X‖ / ‖W X‖", "s", COLOURS["bi"]),
    ):
        if name in layers:
            errors.plot(matrices["layer"], matrices[name], ".", markersize=3, alpha=0.5, color=colour)
            errors.plot(
                layers["layer"], layers[name], marker=marker, markersize=4, linewidth=0.9, color=colour, label=label
            )
    errors.set_ylim(bottom=0)
    errors.set_ylabel("relative error")
    errors.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    depth_axis(errors, report.allocation.model.num_layers)
    return svg(figure)


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
