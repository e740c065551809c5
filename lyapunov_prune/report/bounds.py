"""The figures of a bound check: how near the worst error of each matrix came to its bound, and all errors to theirs."""

from __future__ import annotations

import numpy as np
from matplotlib.patches import Rectangle

from lyapunov_prune.bounds.report import EDGES, BoundsReport, RatioDistribution
from lyapunov_prune.report.drawing import COLOURS, INK, SMALL, depth_axis, one_panel, svg


def bounds_figures(report: BoundsReport) -> dict[str, str]:
    """By name; the distribution where there is one."""
    figures = {"bounds": bounds_figure(report)}
    return figures if report.distribution is None else figures | {"ratios": ratios_figure(report.distribution)}


def ratios_figure(distribution: RatioDistribution) -> str:
    """How many inputs of all matrices have which error / bound; the last bar is at the bound or above it."""
    figure, axes = one_panel(6.5, 2.8)
    width = EDGES[1] - EDGES[0]
    axes.bar(EDGES, distribution.counts, width, align="edge", color=COLOURS["rho"], edgecolor="white", linewidth=0.5)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("error / bound")
    axes.set_ylabel("inputs")
    return svg(figure)


def bounds_figure(report: BoundsReport) -> str:
    """The worst error / bound of each component in each layer, over all settings and heads; violations framed."""
    components = list(dict.fromkeys(report.components))
    depth = max(report.layers) + 1
    places = [(components.index(c), layer) for c, layer in zip(report.components, report.layers, strict=True)]
    worst = np.full((len(components), depth), np.nan)
    for place, ratio in zip(places, report.ratio.T, strict=True):
        worst[place] = np.fmax(worst[place], np.fmax.reduce(ratio))
    figure, axes = one_panel(9, 1.1 + 0.32 * len(components))
    image = axes.imshow(worst, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (row, layer), value in np.ndenumerate(worst):
        if not np.isnan(value):  # experts that no bound was checked for
            text = f"{value:.2f}".removeprefix("0")
            axes.text(layer, row, text, ha="center", va="center", fontsize=SMALL, color="white" if value < 0.5 else INK)
    where = dict(zip(report.names, places, strict=True))
    violated = {where[v.check.matrix] for v in report.violations}
    for number, (row, layer) in enumerate(sorted(violated)):
        label = None if number else "violation"
        axes.add_patch(Rectangle((layer - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", lw=2, label=label))
    if violated:
        axes.legend(frameon=False, fontsize=SMALL, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_yticks(range(len(components)), components)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="worst error / bound", pad=0.02).outline.set_visible(False)
    depth_axis(axes, depth)
    return svg(figure)
