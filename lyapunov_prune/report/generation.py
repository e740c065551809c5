"""Two models that write from the same prompts: how alike their steps are, and for how long their texts."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.generation import GenerationDivergence
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, panels, svg


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
        axes.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.14), ncols=3)
    share.set_xlabel("decoding step")
    share.set_xlim(-0.5, len(steps) - 0.5)
    share.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return svg(figure)
