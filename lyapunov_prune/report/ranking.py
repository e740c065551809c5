"""Figures of removal: scores and the order that they give, searches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.angular import AngularDistance
from lyapunov_prune.ranking.oracle import GreedyRemoval
from lyapunov_prune.ranking.tried import BestRemoval
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, SMALL, depth_axis, labelled, log_axis, one_panel, svg


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
                fontsize=SMALL,
                color=INK,
            )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return labelled(figure, axes, "layers removed; the number is the layer that goes", "perplexity")


def best_figure(search: BestRemoval) -> str:
    """Perplexity of every set on the windows that checked it over the forwards spent; the chosen is ringed.

    A set that was mended is shown once more.
    """
    figure, axes = one_panel(6.5, 3.6)
    with np.errstate(over="ignore"):
        dense = np.exp(search.dense.mean())
        perplexity = np.exp([tried.windows.mean() for tried in search.tried])
        mended = np.exp([each.mended.mean() for each in search.finals])
    forwards = np.array([tried.forwards for tried in search.tried])
    swap = np.array([tried.swap for tried in search.tried])
    axes.axhline(dense, color=GREY, linewidth=0.8, label=f"dense, {dense:.3g}")
    kinds = ((~swap, "proposed by a criterion", "o", COLOURS["bi"]), (swap, "swap of one layer", "x", COLOURS["blend"]))
    for shown, label, marker, colour in kinds:
        if np.isfinite(perplexity[shown]).any():
            axes.plot(forwards[shown], perplexity[shown], marker, markersize=4, color=colour, label=label)
    if np.isfinite(mended).any():
        spent = np.array([each.forwards for each in search.finals])
        axes.plot(spent, mended, "s", markersize=4, color=COLOURS["rho"], label="mended")
    chosen = forwards[search.chosen], perplexity[search.chosen]
    axes.plot(*chosen, "o", markersize=9, fillstyle="none", color=INK, label="chosen")
    log_axis(axes)
    axes.margins(y=0.12)
    return labelled(figure, axes, "forwards of the dense model over the check windows", "perplexity without the set")


def angular_figure(measured: AngularDistance) -> str:
    """How far runs of 1, 2, 4, … layers turn the state, at the layer that each begins with; the nearest is filled."""
    figure, axes = one_panel(9, 3.6)
    layers = len(measured.distance) - 1
    lengths = [2**k for k in range(layers.bit_length()) if 2**k < layers]
    for length, colour in zip(lengths, COLOURS.values(), strict=False):
        begins = measured.begins(length)
        axes.plot(
            begins, "-o", markersize=4, linewidth=0.8, color=colour, markerfacecolor="white", label=f"{length} in a row"
        )
        first = int(np.nanargmin(begins))
        axes.plot(first, begins[first], "o", markersize=6, color=colour)
    log_axis(axes)
    axes.set_ylabel("1 − cos, ends of the run")
    axes.legend(frameon=False, fontsize=SMALL, ncols=2)
    depth_axis(axes, layers)
    axes.set_xlabel("first layer of the run")
    return svg(figure)


def ranking_figure(plans: Mapping[str, PruningPlan]) -> str:
    """One strip a criterion: every layer with its rank (1 goes first), the removed ones filled."""
    figure, axes = one_panel(9, 0.9 + 0.5 * len(plans))
    for row, (name, plan) in enumerate(plans.items()):
        ranks = np.argsort(np.argsort(plan.scores, kind="stable")) + 1
        for layer, rank in enumerate(ranks):
            removed = layer in plan.touched
            colour, score = COLOURS.get(name, GREY), "–" if np.isnan(plan.scores[layer]) else str(rank)
            fill, ink = (colour, "white") if removed else ("white", INK)
            place = (layer - 0.46, row - 0.42)
            axes.add_patch(Rectangle(place, 0.92, 0.84, facecolor=fill, edgecolor=colour, linewidth=0.8))
            axes.text(layer, row, score, ha="center", va="center", fontsize=SMALL, color=ink)
    axes.set_yticks(range(len(plans)), [f"{name}" for name in plans])
    axes.set_ylim(len(plans) - 0.45, -0.55)
    count = len(next(iter(plans.values())).scores)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    depth_axis(axes, count)
    return svg(figure)
