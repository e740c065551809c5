"""Figures of multiple choice with a dense and a compressed model: what the options weigh, and what is proven."""

from __future__ import annotations

import numpy as np

from lyapunov_prune.candidates import ChoiceComparison
from lyapunov_prune.report.drawing import COLOURS, GREY, log_axis, one_panel, svg


def choices_figures(measured: ChoiceComparison) -> dict[str, str]:
    """`options`, and where the theorem speaks of the models also `certificate`."""
    figures = {"options": options_figure(measured)}
    if np.isfinite(measured.moved).any():
        figures["certificate"] = certificate_figure(measured)
    return figures


def options_figure(measured: ChoiceComparison) -> str:
    """Probability of the first tokens of all options out of the vocabulary, an item a point; filled: choice kept."""
    figure, axes = one_panel(5.4, 4.2)
    kept = measured.chosen("dense") == measured.chosen("compressed")
    x, y = measured.dense_mass, measured.compressed_mass
    for which, label, fill in ((kept, "the same choice", COLOURS["rho"]), (~kept, "another choice", "none")):
        axes.scatter(
            x[which],
            y[which],
            s=16,
            facecolor=fill,
            edgecolor=COLOURS["rho"],
            linewidth=0.8,
            label=f"{label}, {which.sum()}",
        )
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    axes.plot(ends, ends, color=GREY, linewidth=0.8)
    log_axis(axes, "x")
    log_axis(axes)
    axes.set_xlabel("probability of the options' first tokens, dense")
    axes.set_ylabel("the same, compressed")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


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
    axes.set_xlabel("how far the state moved / radius within which the first token is proven to stay")
    axes.set_ylabel("items, %")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)
