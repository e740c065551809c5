"""Figures of what a change does to predictions: state, logits, probabilities; writing and choosing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lyapunov_prune.predictions.choice_comparison import ChoiceComparison
from lyapunov_prune.predictions.divergence import SkipDivergence, SublayerDivergence
from lyapunov_prune.predictions.generation import GenerationDivergence
from lyapunov_prune.predictions.hierarchy_probe import HierarchyProbe
from lyapunov_prune.predictions.history import READ, HistoryDivergence
from lyapunov_prune.predictions.verdict import LOST, STAYS, Verdict
from lyapunov_prune.report.drawing import (
    COLOURS,
    GREY,
    INK,
    SMALL,
    STYLES,
    Panel,
    by_rows,
    depth_axis,
    labelled,
    log_axis,
    one_panel,
    over,
    panels,
    shown,
    svg,
)

_SPACES = (("hidden", "state h"), ("logit", "logits z"), ("probability", "probabilities p"))


def hierarchy_figure(probe: HierarchyProbe) -> str:
    """`1 − cos` of the state, the logits and the probabilities over layers: measured, and the estimate as a line.

    Means over steps; the thin bars hold the middle half of the steps. One scale for the three, so that what grows
    from one space to the next is seen.
    """
    figure, column = panels(9, 8.4, 3)
    frame, means = probe.to_frame(), probe.by_layer()
    for axes, (space, name) in zip(column, _SPACES, strict=True):
        for i, (part, (colour, marker)) in enumerate(zip(probe.what, STYLES, strict=False)):
            rows = means[means.what == part]
            x = rows.layer + 0.2 * (i - (len(probe.what) - 1) / 2)
            steps = frame[frame.what == part].groupby("layer")[space]
            axes.vlines(
                x, shown(steps.quantile(0.25)), shown(steps.quantile(0.75)), color=colour, linewidth=0.8, alpha=0.6
            )
            axes.plot(x, shown(rows[space]), marker, markersize=4, color=colour, label=part)
            axes.plot(x, shown(rows[f"{space}_estimate"]), linewidth=0.9, color=colour)
        axes.plot([], [], color=GREY, linewidth=0.9, label="second-order estimate")
        axes.set_yscale("log")
        axes.set_ylabel(f"1 − cos, {name}")
    low, high = zip(*(axes.get_ylim() for axes in column), strict=True)
    for axes in column:
        axes.set_ylim(min(low), max(high))
        log_axis(axes)
    column[0].legend(frameon=False, fontsize=SMALL, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    depth_axis(column[-1], probe.kl.shape[1])
    return svg(figure)


def kl_figure(probe: HierarchyProbe) -> str:
    """KL(p‖q) against its estimate, one point a layer and `what`, means over steps; both bounds above each.

    The variance bound is drawn where it holds at every step.
    """
    figure, axes = one_panel(6.5, 5)
    means = probe.by_layer()
    means = means[(means.kl > 0) & (means.kl_estimate > 0)]
    for part, (colour, marker) in zip(probe.what, STYLES, strict=False):
        rows = means[means.what == part]
        axes.vlines(rows.kl_estimate, rows.kl, rows.range_bound, color=colour, linewidth=0.4, alpha=0.4)
        axes.plot(rows.kl_estimate, rows.range_bound, "_", color=colour, markersize=6)
        axes.plot(rows.kl_estimate, rows.variance_bound, "+", color=colour, markersize=6)
        axes.plot(rows.kl_estimate, rows.kl, marker, markersize=4, color=colour, label=part)
    if len(means):
        ends = np.array([means.kl_estimate.min(), means.kl_estimate.max()])
        axes.plot(ends, ends, color=GREY, linewidth=0.8, label="measured = estimate")
        log_axis(axes)
        log_axis(axes, "x")
    axes.plot([], [], "_", color=GREY, label="range bound")
    axes.plot([], [], "+", color=GREY, label="variance bound, where c ≤ 1")
    return labelled(figure, axes, f"estimate Var_p(Δz)/(2T²), T = {probe.temperature:g}", "KL(p‖q), nats")


def choices_figures(measured: ChoiceComparison) -> dict[str, str]:
    """`options`; `subspace` where items differ in first tokens; `certificate` where the theorem speaks of both."""
    figures = {"options": options_figure(measured)}
    if np.isfinite(measured.options_kl).any():
        figures["subspace"] = subspace_figure(measured)
    if np.isfinite(measured.moved).any():
        figures["certificate"] = certificate_figure(measured)
    return figures


def options_figure(measured: ChoiceComparison) -> str:
    """Probability of the first tokens of all options out of the vocabulary, an item a point; filled: choice kept."""
    figure, axes = one_panel(5.4, 4.2)
    kept = measured.chosen("dense") == measured.chosen("compressed")
    x, y = measured.dense_mass, measured.compressed_mass
    for which, label, fill in ((kept, "the same choice", COLOURS["rho"]), (~kept, "another choice", "none")):
        style: dict[str, Any] = {"facecolor": fill, "edgecolor": COLOURS["rho"], "label": f"{label}, {which.sum()}"}
        axes.scatter(x[which], y[which], s=16, linewidth=0.8, **style)
    _diagonal(axes, x, y)
    return labelled(figure, axes, "probability of the options' first tokens, dense", "the same, compressed")


def _diagonal(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """The line on which `y` equals `x`, on logarithmic axes."""
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    axes.plot(ends, ends, color=GREY, linewidth=0.8)
    log_axis(axes, "x")
    log_axis(axes)


def subspace_figure(measured: ChoiceComparison) -> str:
    """KL over the vocabulary and among the options' first tokens, an item a point; below the line the options moved
    less. What did not move at all has no place on a logarithmic axis."""
    figure, axes = one_panel(5.4, 4.2)
    told = np.isfinite(measured.options_kl) & np.isfinite(measured.kl)
    x, y = measured.kl[told], measured.options_kl[told]
    label = f"less among the options in {(y < x).sum()} of {told.sum()} items"
    seen = (x > 0) & (y > 0)
    axes.scatter(x[seen], y[seen], s=16, color=COLOURS["rho"], linewidth=0, label=label)
    if seen.any():
        _diagonal(axes, x[seen], y[seen])
    return labelled(figure, axes, "KL(p‖q) over the vocabulary, nats", "KL among the options' first tokens, nats")


def certificate_figure(measured: ChoiceComparison) -> str:
    """Share of items whose state moved by at most so much of its radius: below 1 the theorem proves the token."""
    figure, axes = one_panel(6.5, 3.2)
    decided = np.isfinite(measured.moved)
    with np.errstate(divide="ignore"):
        ratio = np.sort(measured.moved[decided] / measured.radius[decided])
    ratio = ratio[np.isfinite(ratio)]  # a radius of 0: two options of one logit
    share = 100 * np.arange(1, len(ratio) + 1) / decided.sum()
    axes.step(ratio, share, where="post", color=COLOURS["bi"], linewidth=1.2)
    proven = measured.certified[decided].mean()
    axes.axvline(1, color=GREY, linewidth=0.8, label=f"proven to the left: {proven:.0%} of {decided.sum()} items")
    axes.set_ylim(-3, 103)
    log_axis(axes, "x")
    return labelled(
        figure, axes, "how far the state moved / radius within which the first token is proven to stay", "items, %"
    )


def generation_figure(measured: GenerationDivergence) -> str:
    """Above: cosine similarity per step in the three spaces. Below: the share of texts still the same, and of those
    that neither model has ended."""
    similarity = {
        "state": measured.state_similarity,
        "logits": measured.logit_similarity,
        "probabilities": measured.probability_similarity,
    }
    lowest = min((float(np.nanmin(v)) for v in similarity.values() if np.isfinite(v).any()), default=0.0)
    share = {"texts still the same": 100 * measured.same_text, "texts not ended": 100 * measured.running}
    return over(
        "decoding step",
        5.4,
        Panel("cosine similarity", similarity, limits=(min(0.0, lowest), 1.03)),
        Panel("prompts, %", share, limits=(-3, 103)),
    )


def verdict_figure(verdict: Verdict) -> str:
    """A bar a kind of task: the share of decisions that stayed with its interval; a mark where they are certain to."""
    figure, axes = one_panel(7.5, 1.2 + 0.6 * len(verdict.kinds))
    y = np.arange(len(verdict.kinds))
    same = np.array([k.same for k in verdict.kinds])
    bars = np.abs(np.array([[k.low, k.high] for k in verdict.kinds]).T - same)
    axes.barh(y, 100 * same, height=0.5, color=COLOURS["rho"], alpha=0.85, label="decisions that stayed")
    axes.errorbar(100 * same, y, xerr=100 * bars, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
    axes.plot([100 * k.certain for k in verdict.kinds], y, "|", markersize=22, color=COLOURS["bi"], label="certain to")
    for limit in (LOST, STAYS):
        axes.axvline(100 * limit, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 101)
    return by_rows(figure, axes, [f"{k.task}: {k.word}" for k in verdict.kinds], "share of decisions, %")


def history_figure(measured: HistoryDivergence) -> str:
    """By step, for both readings: KL and its estimate, `1 − cos` of the probabilities and its estimate, `‖Δz‖/‖z‖`."""

    def panel(y: str, values: np.ndarray, estimates: Iterable[np.ndarray] = ()) -> Panel:
        lines = {f"reads the {reads}": row for reads, row in zip(READ, values, strict=True)}
        return Panel(y, lines, log=True, dashed=tuple(estimates))

    return over(
        "decoding step",
        7.6,
        panel("KL(p‖q), nats", measured.kl, measured.kl_estimate),
        panel("1 − cos, probabilities p", measured.probability, measured.probability_estimate),
        panel("‖Δz‖ / ‖z‖", measured.logit_change),
    )


def divergence_figure(measured: SkipDivergence) -> str:
    """Above: KL of the prediction without each layer and its estimate, logarithmic. Below: share of flipped tokens."""
    left_out = f"its {measured.what}" if isinstance(measured, SublayerDivergence) else "the layer"
    nats = {f"KL(dense ‖ without {left_out})": measured.kl, "Var(Δz) / 2T², the estimate": measured.variance}
    flipped = Panel("tokens flipped, %", {"": 100 * measured.flipped}, limits=(0, None))
    return over("layer", 5.0, Panel("nats a token", nats, log=True), flipped)
