"""Figures of layers that are skipped or removed: the prediction without one, a greedy search, and healing."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.budget import BudgetedRemoval
from lyapunov_prune.divergence import SkipDivergence
from lyapunov_prune.healing import Healing
from lyapunov_prune.oracle import GreedyRemoval
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, depth_axis, log_axis, one_panel, panels, svg


def divergence_figure(measured: SkipDivergence) -> str:
    """Above: KL of the prediction without each layer and its estimate, logarithmic. Below: share of flipped tokens.

    What is not above 0 has no place on the logarithmic axis and is left out, as is NaN.
    """
    figure, (nats, share) = panels(9, 5.0, 2)
    layers = np.arange(len(measured.kl))
    for values, label, style, marker, colour in (
        (measured.kl, "KL(dense ‖ without the layer)", "-", "o", COLOURS["rho"]),
        (measured.variance, "Var(Δz) / 2T², the estimate", "--", "s", COLOURS["bi"]),
    ):
        shown = np.where(values > 0, values, np.nan)
        nats.plot(layers, shown, style, marker=marker, markersize=4, linewidth=0.9, color=colour, label=label)
    log_axis(nats)
    nats.set_ylabel("nats a token")
    nats.legend(frameon=False, fontsize=8)
    share.plot(layers, 100 * measured.flipped, "-o", markersize=4, linewidth=0.9, color=COLOURS["blend"])
    share.set_ylim(bottom=0)
    share.set_ylabel("tokens flipped, %")
    depth_axis(share, len(layers))
    return svg(figure)


def budget_figure(spent: BudgetedRemoval) -> str:
    """KL of the prediction without the first n layers, for criterion `kl` beside its prediction, and the budget."""
    figure, axes = one_panel(6.5, 3.4)
    removed = np.arange(1, len(spent.kl) + 1)
    shown = [(spent.kl, "measured, removed together", "-o", COLOURS["rho"])]
    if spent.predicted is not None:
        shown.append((spent.predicted, "predicted: sum of the estimates", "--s", COLOURS["bi"]))
    for values, label, style, colour in shown:
        axes.plot(removed, values, style, markersize=4, linewidth=0.9, color=colour, label=label)
    if np.isfinite(spent.max_kl):
        axes.axhline(spent.max_kl, color=GREY, linewidth=0.8, label=f"budget, {spent.max_kl:g}")
    log_axis(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"layers removed, by {spent.ranking.criterion}")
    axes.set_ylabel("KL(dense ‖ pruned), nats a token")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def oracle_figure(search: GreedyRemoval) -> str:
    """Perplexity on the text of the search after each step, with the number of the layer that went."""
    figure, axes = one_panel(6.5, 3.6)
    with np.errstate(over="ignore"):
        perplexity = np.exp(search.losses)
    axes.axhline(perplexity[0], color=GREY, linewidth=0.8, label=f"dense, {perplexity[0]:.3g}")
    axes.plot(perplexity, "-o", markersize=4, linewidth=0.9, color=COLOURS["rho"], label=search.criterion)
    log_axis(axes)
    axes.margins(y=0.12)
    for step, layer in enumerate(search.order, 1):
        if np.isfinite(perplexity[step]):
            axes.annotate(
                str(layer),
                (step, perplexity[step]),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=INK,
            )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layers removed; the number is the layer that goes")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def healing_figure(healing: Healing) -> str:
    """The loss of every step and its mean over a tenth of the steps; what was recovered stands in the legend."""
    figure, axes = one_panel(6.5, 3.4)
    width = math.ceil(healing.steps / 10)
    means = np.convolve(healing.losses, np.full(width, 1 / width), "valid")
    axes.plot(np.arange(healing.steps), healing.losses, ".-", markersize=3, linewidth=0.5, color=GREY, label="a step")
    centres = np.arange(len(means)) + (width - 1) / 2
    axes.plot(centres, means, linewidth=1.6, color=COLOURS["rho"], label=f"mean of {width}")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("distillation loss, nats a token")
    axes.legend(frameon=False, fontsize=8, title=_recovered(healing), title_fontsize=8)
    return svg(figure)


def _recovered(healing: Healing) -> str | None:
    held = healing.held_out
    if held is None or healing.recovered is None:
        return None
    line = f"perplexity {held.before.value:.3g} → {held.after.value:.3g}, dense {held.teacher.value:.3g}"
    return line if np.isnan(healing.recovered) else f"{100 * healing.recovered:.0f} % recovered: {line}"
