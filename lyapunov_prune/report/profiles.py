"""Figures of what the layers do: contraction and influence."""

from __future__ import annotations

import numpy as np

from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.profiles.influence import InfluenceProfile, SublayerInfluence
from lyapunov_prune.report.drawing import (
    COLOURS,
    GREY,
    INK,
    SMALL,
    Panel,
    log_axis,
    one_panel,
    over,
    over_depth,
    with_intervals,
)


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
