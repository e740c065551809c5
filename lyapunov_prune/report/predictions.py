"""Figures of what a change does to predictions: state, logits, probabilities; writing and choosing."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.predictions.attention_paths import AttentionPaths
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
    by_rows,
    depth_axis,
    grid,
    labelled,
    log_axis,
    one_panel,
    panels,
    svg,
)
from lyapunov_prune.results.frames import pd

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
        for i, (part, (colour, marker)) in enumerate(zip(probe.what, _STYLES, strict=False)):
            rows = means[means.what == part]
            x = rows.layer + 0.2 * (i - (len(probe.what) - 1) / 2)
            steps = frame[frame.what == part].groupby("layer")[space]
            axes.vlines(
                x, _shown(steps.quantile(0.25)), _shown(steps.quantile(0.75)), color=colour, linewidth=0.8, alpha=0.6
            )
            axes.plot(x, _shown(rows[space]), marker, markersize=4, color=colour, label=part)
            axes.plot(x, _shown(rows[f"{space}_estimate"]), linewidth=0.9, color=colour)
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
    for part, (colour, marker) in zip(probe.what, _STYLES, strict=False):
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


def _shown(values: pd.Series | np.ndarray) -> np.ndarray:
    """What a logarithmic axis can show: a change of nothing at all has no point."""
    return np.where(values > 0, values, np.nan)


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
    figure, (similarity, share) = panels(9, 5.4, 2)
    steps = np.arange(len(measured.kl))
    for values, label, colour, marker in (
        (measured.state_similarity, "state", COLOURS["blend"], "o"),
        (measured.logit_similarity, "logits", COLOURS["rho"], "s"),
        (measured.probability_similarity, "probabilities", COLOURS["bi"], "^"),
    ):
        if np.isfinite(values).any():
            similarity.plot(steps, values, f"-{marker}", markersize=3, linewidth=0.9, color=colour, label=label)
    similarity.set_ylim(min(0.0, similarity.get_ylim()[0]), 1.03)
    similarity.set_ylabel("cosine similarity")
    for values, label, colour, style in (
        (measured.same_text, "texts still the same", INK, "-"),
        (measured.running, "texts not ended", GREY, "--"),
    ):
        share.step(steps, 100 * values, style, where="mid", color=colour, linewidth=1.2, label=label)
    share.set_ylim(-3, 103)
    share.set_ylabel("prompts, %")
    for axes in (similarity, share):
        axes.legend(frameon=False, fontsize=SMALL, loc="upper right", bbox_to_anchor=(1, 1.14), ncols=3)
    share.set_xlabel("decoding step")
    share.set_xlim(-0.5, len(steps) - 0.5)
    share.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return svg(figure)


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
    figure, column = panels(9, 7.6, 3)
    steps = np.arange(len(measured.running))
    for axes, (name, label) in zip(
        column,
        (("kl", "KL(p‖q), nats"), ("probability", "1 − cos, probabilities p"), ("logit_change", "‖Δz‖ / ‖z‖")),
        strict=True,
    ):
        values = getattr(measured, name)
        estimates = getattr(measured, f"{name}_estimate", None)
        for row, (reads, colour, marker) in enumerate(zip(READ, (COLOURS["rho"], COLOURS["bi"]), "os", strict=True)):
            axes.plot(steps, _shown(values[row]), f"-{marker}", markersize=3, color=colour, label=f"reads the {reads}")
            if estimates is not None:
                axes.plot(steps, _shown(estimates[row]), linewidth=0.8, linestyle="--", color=colour)
        if np.nanmax(values, initial=0.0) > 0:
            log_axis(axes)
        axes.set_ylabel(label)
    column[0].legend(frameon=False, fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    column[-1].set_xlabel("decoding step")
    column[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return svg(figure)


def paths_figure(measured: AttentionPaths) -> str:
    """Above: the two paths and the whole change of attention's output by layer. Below, by step: how much of the weights
    and of the change belongs to the prompt. Bands are the middle half of the other axis."""
    figure, (by_layer, by_step) = grid(9, 5.6, 2, 1)
    layers, steps = np.array(measured.layers), np.arange(measured.value.shape[-1])
    for values, label, colour, marker in (
        (measured.total, "whole change", INK, "o"),
        (measured.value, "value path", COLOURS["rho"], "s"),
        (measured.weight, "weight path", COLOURS["bi"], "^"),
    ):
        _band(by_layer, layers, values, label, colour, marker)
    if measured.total.any():
        log_axis(by_layer)
    by_layer.set_ylabel("norm / dense output")
    by_layer.set_xlabel("layer")
    for values, label, colour, marker in (
        (measured.prompt_weight, "attention to the prompt", COLOURS["blend"], "o"),
        (measured.prompt_share, "change that comes from the prompt", COLOURS["from-end"], "s"),
    ):
        _band(by_step, steps, 100 * values.T, label, colour, marker)
    by_step.set_ylim(-3, 103)
    by_step.set_ylabel("share, %")
    by_step.set_xlabel("decoding step")
    for axes in (by_layer, by_step):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axes.legend(frameon=False, fontsize=SMALL, loc="upper right", bbox_to_anchor=(1, 1.14), ncols=3)
    return svg(figure)


def _band(axes: Axes, x: np.ndarray, values: np.ndarray, label: str, colour: str, marker: str) -> None:
    """Mean and middle half of each row that has a number."""
    finite = np.isfinite(values)
    if not finite.any():  # two equal models
        return
    x, seen = x[finite.any(1)], values[finite.any(1)][:, finite.any(0)]
    low, high = np.nanquantile(seen, [0.25, 0.75], axis=1)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, np.nanmean(seen, axis=1), f"-{marker}", markersize=3, linewidth=0.9, color=colour, label=label)


def divergence_figure(measured: SkipDivergence) -> str:
    """Above: KL of the prediction without each layer and its estimate, logarithmic. Below: share of flipped tokens.

    What is not above 0 has no place on the logarithmic axis and is left out, as is what is not finite.
    """
    figure, (nats, share) = panels(9, 5.0, 2)
    layers = np.arange(len(measured.kl))
    left_out = f"its {measured.what}" if isinstance(measured, SublayerDivergence) else "the layer"
    for values, label, style, marker, colour in (
        (measured.kl, f"KL(dense ‖ without {left_out})", "-", "o", COLOURS["rho"]),
        (measured.variance, "Var(Δz) / 2T², the estimate", "--", "s", COLOURS["bi"]),
    ):
        shown = np.where(np.isfinite(values) & (values > 0), values, np.nan)
        nats.plot(layers, shown, style, marker=marker, markersize=4, linewidth=0.9, color=colour, label=label)
    log_axis(nats)
    nats.set_ylabel("nats a token")
    nats.legend(frameon=False, fontsize=SMALL)
    flipped = np.where(np.isfinite(measured.flipped), measured.flipped, np.nan)
    share.plot(layers, 100 * flipped, "-o", markersize=4, linewidth=0.9, color=COLOURS["blend"])
    share.set_ylim(bottom=0)
    share.set_ylabel("tokens flipped, %")
    depth_axis(share, len(layers))
    return svg(figure)
