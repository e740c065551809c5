"""The figure of healing: the validation perplexity after each round, and the distillation loss of each step."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.healing.report import Healing
from lyapunov_prune.report.drawing import COLOURS, GREY, SMALL, labelled, panels


def healing_figure(healing: Healing) -> str:
    """Above, what the judging windows say: trials of rates as crosses, rounds as a line, what was kept as a ring.

    Below, the loss of every step and its mean over a tenth of the steps.
    """
    figure, (above, below) = panels(6.5, 5.0, 2)
    rows = healing.to_frame()
    finite = rows[np.isfinite(rows["validation perplexity"])]
    tried = finite["round"].str.startswith("trial")
    run, trials = finite[~tried], finite[tried]
    above.plot(run["steps"], run["validation perplexity"], "o-", markersize=4, color=COLOURS["rho"], label="round")
    if len(trials):
        above.plot(trials["steps"], trials["validation perplexity"], "x", color=GREY, label="trial of a rate")
    kept = finite[finite["kept"]]
    above.plot(
        kept["steps"], kept["validation perplexity"], "o", markersize=11, fillstyle="none", color="black", label="kept"
    )
    above.set_ylabel("validation perplexity")
    above.legend(frameon=False, fontsize=SMALL, title=_recovered(healing), title_fontsize=SMALL)

    width = math.ceil(healing.steps / 10)
    means = np.convolve(healing.losses, np.full(width, 1 / width), "valid")
    steps = np.arange(1, healing.steps + 1)
    below.plot(steps, healing.losses, ".-", markersize=3, linewidth=0.5, color=GREY, label="a step")
    below.plot(
        steps[: len(means)] + (width - 1) / 2, means, linewidth=1.6, color=COLOURS["rho"], label=f"mean of {width}"
    )
    below.set_ylim(bottom=0)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return labelled(figure, below, "step", "distillation loss, nats a token")


def _recovered(healing: Healing) -> str | None:
    held = healing.held_out
    if held is None or healing.recovered is None:
        return None
    line = f"perplexity {held.before.value:.3g} → {held.after.value:.3g}, dense {held.teacher.value:.3g}"
    return line if np.isnan(healing.recovered) else f"{100 * healing.recovered:.0f} % recovered: {line}"
