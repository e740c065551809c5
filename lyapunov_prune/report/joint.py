"""Figures of a joint removal: the map over both counts with the pairs of the budget, and the order within each type."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.joint.decision import JointDecision
from lyapunov_prune.joint.importance import Importance
from lyapunov_prune.joint.map import JointMap
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, SMALL, Panel, over, panels, svg


def joint_figure(fitted: JointMap, decision: JointDecision) -> str:
    """Above, P in steps of one layer with the measured points, the budget and the choice; below, P of every pair of the
    budget, its 95 % prediction interval, and what lies within twice the noise of the choice.
    """
    figure, (above, below) = panels(6.5, 7.0, 2)
    L, pairs, predicted = decision.layers, decision.pairs, decision.predicted
    reach = np.minimum(np.maximum((fitted.removed * L).max(0), pairs.max(0)) + 1, L)
    n_a, n_g = np.meshgrid(np.linspace(0, reach[0], 101), np.linspace(0, reach[1], 101))
    P = fitted.predict(np.stack([n_a, n_g], axis=-1) / L)
    lines = above.contour(n_a, n_g, P, levels=12, colors=GREY, linewidths=0.7)
    above.clabel(lines, fontsize=SMALL)
    above.scatter(fitted.removed[:, 0] * L, fitted.removed[:, 1] * L, s=16, color=INK, label="measured")
    above.plot(*pairs.T, linewidth=0.9, color=COLOURS["rho"])
    above.scatter(pairs[:, 0], pairs[:, 1], s=30, facecolor="white", edgecolor=COLOURS["rho"], label="budget", zorder=3)
    above.scatter(
        decision.chosen[0], decision.chosen[1], s=70, marker="s", color=COLOURS["bi"], label="chosen", zorder=4
    )
    above.set_ylabel("activations removed")
    above.legend(edgecolor="none", framealpha=1, fontsize=SMALL, loc="upper right")
    above.set(xlim=(-0.3, reach[0] + 0.1), ylim=(-0.3, reach[1] + 0.1))
    bars = np.stack([predicted - decision.low, decision.high - predicted])
    below.errorbar(pairs[:, 0], predicted, yerr=bars, fmt="o", markersize=4, capsize=2, color=COLOURS["rho"])
    below.plot(decision.chosen[0], predicted[decision.best], "s", markersize=7, color=COLOURS["bi"], zorder=4)
    low = predicted[decision.best] - 2 * decision.noise
    below.axhline(low, color=GREY, linewidth=0.8, label="the choice less twice the noise")
    below.set_xlabel("attentions removed")
    below.set_ylabel("score after recovery")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend(frameon=False, fontsize=SMALL)
    return svg(figure)


def importance_figure(importance: Importance) -> str:
    """By layer what its attention is worth above, and its activation below, each on an axis of its own."""
    worth = {"attention": importance.attention, "activation": importance.activation}
    return over("layer", 4.5, *(Panel(name, {"": each}, bool((each > 0).all())) for name, each in worth.items()))
