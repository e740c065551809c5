"""Figures of a hierarchy probe: what changing one layer does to the state, the logits and the probabilities."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lyapunov_prune.hierarchy import HierarchyProbe
from lyapunov_prune.report.drawing import COLOURS, GREY, depth_axis, log_axis, one_panel, panels, svg

_STYLES = ((COLOURS["rho"], "o"), (COLOURS["bi"], "s"), (COLOURS["blend"], "^"))
_SPACES = (("hidden", "state h"), ("logit", "logits z"), ("probability", "probabilities p"))


def hierarchy_figure(probe: HierarchyProbe) -> str:
    """`1 − cos` of the state, the logits and the probabilities over layers: measured, and the estimate as a line.

    Means over steps; the thin bars hold the middle half of the steps. One scale for the three, so that what grows
    from one space to the next is seen.
    """
    figure, column = panels(9, 8.4, 3)
    frame, means = probe.to_frame(), probe.by_layer()
    for axes, (space, name) in zip(column, _SPACES, strict=True):
        for i, (what, (colour, marker)) in enumerate(zip(probe.what, _STYLES, strict=False)):
            part = means[means.what == what]
            x = part.layer + 0.2 * (i - (len(probe.what) - 1) / 2)
            steps = frame[frame.what == what].groupby("layer")[space]
            axes.vlines(
                x, _shown(steps.quantile(0.25)), _shown(steps.quantile(0.75)), color=colour, linewidth=0.8, alpha=0.6
            )
            axes.plot(x, _shown(part[space]), marker, markersize=4, color=colour, label=what)
            axes.plot(x, _shown(part[f"{space}_estimate"]), linewidth=0.9, color=colour)
        axes.plot([], [], color=GREY, linewidth=0.9, label="second-order estimate")
        axes.set_yscale("log")
        axes.set_ylabel(f"1 − cos, {name}")
    low, high = zip(*(axes.get_ylim() for axes in column), strict=True)
    for axes in column:
        axes.set_ylim(min(low), max(high))
        log_axis(axes)
    column[0].legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    depth_axis(column[-1], probe.kl.shape[1])
    return svg(figure)


def kl_figure(probe: HierarchyProbe) -> str:
    """KL(p‖q) against its estimate, one point a layer and `what`, means over steps; both bounds above each.

    The variance bound is drawn where it holds at every step.
    """
    figure, axes = one_panel(6.5, 5)
    means = probe.by_layer()
    means = means[(means.kl > 0) & (means.kl_estimate > 0)]
    for what, (colour, marker) in zip(probe.what, _STYLES, strict=False):
        part = means[means.what == what]
        axes.vlines(part.kl_estimate, part.kl, part.range_bound, color=colour, linewidth=0.4, alpha=0.4)
        axes.plot(part.kl_estimate, part.range_bound, "_", color=colour, markersize=6)
        axes.plot(part.kl_estimate, part.variance_bound, "+", color=colour, markersize=6)
        axes.plot(part.kl_estimate, part.kl, marker, markersize=4, color=colour, label=what)
    if len(means):
        ends = np.array([means.kl_estimate.min(), means.kl_estimate.max()])
        axes.plot(ends, ends, color=GREY, linewidth=0.8, label="measured = estimate")
        log_axis(axes)
        log_axis(axes, "x")
    axes.plot([], [], "_", color=GREY, label="range bound")
    axes.plot([], [], "+", color=GREY, label="variance bound, where c ≤ 1")
    axes.set_xlabel(f"estimate Var_p(Δz)/(2T²), T = {probe.temperature:g}")
    axes.set_ylabel("KL(p‖q), nats")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def _shown(values: pd.Series) -> np.ndarray:
    """What a logarithmic axis can show: a change of nothing at all has no point."""
    return np.where(values > 0, values, np.nan)
