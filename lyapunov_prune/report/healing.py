"""The figure of healing: the loss over the steps, and what they recovered."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.healing.report import Healing
from lyapunov_prune.report.drawing import COLOURS, GREY, one_panel, svg


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
