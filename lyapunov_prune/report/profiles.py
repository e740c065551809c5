"""Figures of what the layers do: contraction, growth, influence, activations, Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from lyapunov_prune.profiles.activations import ActivationStatistics
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.influence import InfluenceProfile, SublayerInfluence
from lyapunov_prune.profiles.jacobian import JacobianNorms
from lyapunov_prune.report.drawing import (
    COLOURS,
    GREY,
    INK,
    SMALL,
    STYLES,
    Panel,
    depth_axis,
    log_axis,
    one_panel,
    over,
    over_depth,
    panels,
    svg,
    with_intervals,
)


def activation_figure(statistics: ActivationStatistics) -> str:
    """Rank of the outputs, kurtosis and sparsity of the inputs over depth, for the matrices of the MLP.

    The MLP's are the last matrix of a layer and those beside it in the same module.
    """
    figure, (ranks, tails, zeros) = panels(9, 7.2, 3)
    chosen = _mlp(statistics)
    relative = statistics.effective_rank / statistics.width
    alike = statistics.token_rank / statistics.width
    for (component, at), (colour, marker) in zip(chosen.items(), STYLES, strict=False):
        layers = np.array(statistics.layers)[at]
        ranks.plot(layers, relative[at], marker=marker, markersize=4, color=colour, label=component)
        ranks.plot(layers, alike[at], "--", marker=marker, markersize=4, color=colour, markerfacecolor="white")
    ranks.plot([], [], "--", color=GREY, label="every token weighed alike")
    log_axis(ranks)
    ranks.set_ylabel("effective rank of y / width")
    ranks.legend(frameon=False, fontsize=SMALL, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    for axes, values, label in (
        (tails, statistics.kurtosis, "excess kurtosis of x"),
        (zeros, 100 * statistics.sparsity, "sparsity of x, %"),
    ):
        # Gate and up see the same input: one line for both.
        shared: dict[bytes, list[str]] = {}
        for component, at in chosen.items():
            shared.setdefault(values[at].tobytes(), []).append(component)
        for names, (colour, marker) in zip(shared.values(), STYLES, strict=False):
            at = chosen[names[0]]
            layers = np.array(statistics.layers)[at]
            axes.plot(layers, values[at], marker=marker, markersize=4, color=colour, label=", ".join(names))
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=SMALL)
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
        style: dict[str, Any] = {"marker": marker, "markersize": 4, "color": colour, "markerfacecolor": "white"}
        axes.plot(layers, typical, "--", label=f"{label}, ‖J‖_F/√n", **style)
    axes.axhline(1, color=GREY, linewidth=0.8)
    log_axis(axes)
    return over_depth(figure, axes, len(layers), "stretch of an error", ncols=2)


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


def contraction_figure(profile: ContractionProfile) -> str:
    """ρ of every layer with its interval, on a logarithmic axis, and the other pooling beside it."""
    figure, axes = one_panel(9, 3.6)
    layers = np.arange(len(profile.rho))
    for pooling, colour, marker in (("token", COLOURS["rho, token pooling"], "s"), ("energy", COLOURS["rho"], "o")):
        pooled = profile.pooled(pooling)  # type: ignore[arg-type]
        style = {"fmt": marker, "color": colour, "alpha": 1.0 if pooling == profile.pooling else 0.55}
        with_intervals(axes, layers, pooled.rho, pooled.rho_interval, label=f"{pooling} pooling", **style)
    axes.axhline(1, color=GREY, linewidth=0.8)
    for layer in profile.pooling_disagrees:
        before, after = profile.sink_state_share[layer : layer + 2]
        left = layer > 0.8 * len(layers)
        axes.annotate(
            f"energy in one token a window:\n{before:.0%} before, {after:.0%} after",
            (layer, profile.pooled("energy").rho[layer]),
            xytext=(-7 if left else 7, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=SMALL,
            color=INK,
        )
    hidden = layers[~profile.above_floor]
    if len(hidden):
        axes.plot(hidden, profile.rho[hidden], "x", color="red", label="not above rounding")
    log_axis(axes)
    axes.margins(y=0.12)
    return over_depth(figure, axes, len(layers), "contraction factor ρ")


def influence_figure(profile: InfluenceProfile) -> str:
    """Block Influence of every layer with its standard error, on a logarithmic axis."""
    return over("layer", 3.2, Panel("Block Influence, 1 − cos", {"": profile.influence}, True, (profile.spread,)))


def sublayer_figure(measured: SublayerInfluence) -> str:
    """Block Influence of attention and MLP, with standard errors, on a logarithmic axis."""
    lines, bars = (
        {"attention": measured.attention, "MLP": measured.mlp},
        (measured.attention_spread, measured.mlp_spread),
    )
    return over("layer", 3.2, Panel("Block Influence, 1 − cos", lines, True, bars))
