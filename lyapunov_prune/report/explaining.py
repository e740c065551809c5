"""The figure of an explanation: where the relative error is added, how it travels, and what each layer costs."""

from __future__ import annotations

import numpy as np

from lyapunov_prune.explaining.explanation import Explanation
from lyapunov_prune.report.drawing import COLOURS, GREY, SMALL, over_depth, panels


def explanation_figure(explanation: Explanation) -> str:
    """Above, a waterfall: each bar begins where the error stood, added first, then what amplifying or damping did.

    Below, the KL that a layer costs alone, and what putting it back alone saves.
    """
    relative, layers = explanation.relative, len(explanation.passed)
    added, carried = explanation.parts[1], explanation.carried
    figure, (above, below) = panels(9, 5.2, 2)
    places, arriving = np.arange(layers), relative[:-1]
    above.bar(places - 0.2, added, 0.4, bottom=arriving, color=COLOURS["bi"], label="added by the layer")
    above.bar(places + 0.2, carried, 0.4, bottom=arriving + added, color=COLOURS["rho"], label="amplified or damped")
    above.step([*places - 0.5, layers - 0.5], relative, where="post", color=GREY, linewidth=0.8, label="arriving error")
    above.set_ylim(0, 1.08 * max((arriving + added).max(), relative.max()) or 1)
    above.set_ylabel("error / state")
    above.legend(frameon=False, fontsize=SMALL)
    below.bar(places - 0.2, explanation.kl_only[1:-1], 0.4, color=GREY, label="compressed alone")
    below.bar(places + 0.2, explanation.gain[1:-1], 0.4, color=COLOURS["blend"], label="saved when put back alone")
    below.axhline(0, color=GREY, linewidth=0.8)
    return over_depth(figure, below, layers, "KL, nats a token")
