"""Figures of what happens inside the layers: activations, Jacobians, bounds of single matrices."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from lyapunov_prune.activations import ActivationStatistics
from lyapunov_prune.bounds_report import BoundsReport
from lyapunov_prune.jacobian import JacobianNorms
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, depth_axis, log_axis, one_panel, panels, svg

# The matrix that ends the MLP, then those that begin it.
_STYLES = ((COLOURS["rho"], "o"), (COLOURS["bi"], "s"), (COLOURS["blend"], "^"), (COLOURS["from-end"], "D"))


def activation_figure(statistics: ActivationStatistics) -> str:
    """Rank of the outputs, kurtosis and sparsity of the inputs over depth, for the matrices of the MLP.

    The MLP's are the last matrix of a layer and those beside it in the same module.
    """
    figure, (ranks, tails, zeros) = panels(9, 7.2, 3)
    chosen = _mlp(statistics)
    relative = statistics.effective_rank / statistics.width
    alike = statistics.token_rank / statistics.width
    for (component, at), (colour, marker) in zip(chosen.items(), _STYLES, strict=False):
        layers = np.array(statistics.layers)[at]
        ranks.plot(layers, relative[at], marker=marker, markersize=4, color=colour, label=component)
        ranks.plot(layers, alike[at], "--", marker=marker, markersize=4, color=colour, markerfacecolor="white")
    ranks.plot([], [], "--", color=GREY, label="every token weighed alike")
    log_axis(ranks)
    ranks.set_ylabel("effective rank of y / width")
    ranks.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    for axes, values, label in (
        (tails, statistics.kurtosis, "excess kurtosis of x"),
        (zeros, 100 * statistics.sparsity, "sparsity of x, %"),
    ):
        # Gate and up see the same input: one line for both.
        shared: dict[bytes, list[str]] = {}
        for component, at in chosen.items():
            shared.setdefault(values[at].tobytes(), []).append(component)
        for names, (colour, marker) in zip(shared.values(), _STYLES, strict=False):
            at = chosen[names[0]]
            layers = np.array(statistics.layers)[at]
            axes.plot(layers, values[at], marker=marker, markersize=4, color=colour, label=", ".join(names))
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=8)
    _signed_log_axis(tails)
    zeros.set_ylim(bottom=0)
    depth_axis(zeros, max(statistics.layers) + 1)
    return svg(figure)


def jacobian_figure(norms: JacobianNorms) -> str:
    """Largest and typical stretch of both branches over depth, on a logarithmic axis; 1 is drawn."""
    figure, axes = one_panel(9, 3.8)
    layers = np.arange(len(norms.attention_norm))
    for branch, label, colour, marker in (
        ("attention", "attention", COLOURS["rho"], "o"),
        ("mlp", "MLP", COLOURS["bi"], "s"),
    ):
        largest, typical = getattr(norms, f"{branch}_norm"), getattr(norms, f"{branch}_gain")
        axes.plot(layers, largest, marker=marker, markersize=4, color=colour, label=f"{label}, ‖J‖ from below")
        axes.plot(
            layers,
            typical,
            "--",
            marker=marker,
            markersize=4,
            color=colour,
            markerfacecolor="white",
            label=f"{label}, ‖J‖_F/√n",
        )
    axes.axhline(1, color=GREY, linewidth=0.8)
    log_axis(axes)
    axes.set_ylabel("stretch of an error")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    depth_axis(axes, len(layers))
    return svg(figure)


def bounds_figure(report: BoundsReport) -> str:
    """The worst error / bound of each component in each layer, over all settings and heads; violations framed."""
    components = list(dict.fromkeys(report.components))
    depth = max(report.layers) + 1
    places = [(components.index(c), layer) for c, layer in zip(report.components, report.layers, strict=True)]
    worst = np.full((len(components), depth), np.nan)
    for place, ratio in zip(places, report.ratio.T, strict=True):
        worst[place] = np.fmax(worst[place], np.fmax.reduce(ratio))
    figure, axes = one_panel(9, 1.1 + 0.32 * len(components))
    image = axes.imshow(worst, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for (row, layer), value in np.ndenumerate(worst):
        if not np.isnan(value):  # experts that no bound was checked for
            text = f"{value:.2f}".removeprefix("0")
            axes.text(layer, row, text, ha="center", va="center", fontsize=7, color="white" if value < 0.5 else INK)
    where = dict(zip(report.names, places, strict=True))
    violated = {where[v.check.matrix] for v in report.violations}
    for number, (row, layer) in enumerate(sorted(violated)):
        label = None if number else "violation"
        axes.add_patch(Rectangle((layer - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", lw=2, label=label))
    if violated:
        axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_yticks(range(len(components)), components)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="worst error / bound", pad=0.02).outline.set_visible(False)
    depth_axis(axes, depth)
    return svg(figure)


def _mlp(statistics: ActivationStatistics) -> dict[str, list[int]]:
    """Component -> places of its matrices: the last component of the first layer, then its neighbours."""
    first = [i for i, layer in enumerate(statistics.layers) if layer == statistics.layers[0]]
    own = list(dict.fromkeys(statistics.components[i] for i in first))
    module = own[-1].rpartition(".")[0]
    names = [own[-1], *(name for name in own[:-1] if name.rpartition(".")[0] == module)]
    return {name: [i for i, c in enumerate(statistics.components) if c == name] for name in names}


def _signed_log_axis(axes: Axes) -> None:
    """Logarithmic beyond ±1 and linear between: an excess may be negative."""
    axes.set_yscale("symlog", linthresh=1)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
