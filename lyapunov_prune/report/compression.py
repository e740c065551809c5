"""Figures of compression: how much of each layer and the errors of its matrices; what each size costs."""

from __future__ import annotations

from lyapunov_prune.budget.spent import Spent
from lyapunov_prune.compression.report import CompressionReport
from lyapunov_prune.report.drawing import COLOURS, INK, labelled, log_axis, one_panel, over_depth, panels


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
    where = {"ncols": 2, "loc": "lower left", "bbox_to_anchor": (0, 1)}
    return over_depth(figure, errors, report.allocation.model.num_layers, "relative error", **where)


def sizes_figure(spent: Spent) -> str:
    """The predicted KL by bits a weight, types chosen by cost and one type for all, and what was measured (95 %)."""
    figure, axes = one_panel(6.5, 3.5)
    frontier, found = spent.frontier, spent.measured
    for label, cost, colour in (
        ("one type for all", frontier.alike, COLOURS["bi"]),
        ("types by cost", frontier.best, COLOURS["rho"]),
    ):
        axes.plot(frontier.bits, cost, marker="o", markersize=4, color=colour, label=f"{label}, predicted")
    axes.plot(spent.bits, found.change, "x", color=INK, label="measured")
    axes.plot([spent.bits] * 2, [found.low, found.high], color=INK, linewidth=0.8)
    log_axis(axes)
    return labelled(figure, axes, "bits a weight", "KL(dense ‖ rounded), nats a token")
