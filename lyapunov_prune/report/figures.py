"""Figures as SVG text, one function a figure, from saved results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.angular import AngularDistance
from lyapunov_prune.branch_influence import SublayerInfluence
from lyapunov_prune.contraction import ContractionProfile
from lyapunov_prune.evaluation.removal import RemovalCurve
from lyapunov_prune.evaluation.speed import Speed
from lyapunov_prune.influence import InfluenceProfile
from lyapunov_prune.plan import PruningPlan
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, depth_axis, log_axis, one_panel, panels, svg


def contraction_figure(profile: ContractionProfile) -> str:
    """ρ of every layer with its interval, on a logarithmic axis, and the other pooling beside it."""
    figure, axes = one_panel(9, 3.6)
    layers = np.arange(len(profile.rho))
    for pooling, colour, marker in (("token", COLOURS["rho, token pooling"], "s"), ("energy", COLOURS["rho"], "o")):
        pooled = profile.pooled(pooling)  # type: ignore[arg-type]
        interval = np.abs(pooled.rho_interval - pooled.rho[:, None]).T
        axes.errorbar(
            layers,
            pooled.rho,
            yerr=None if np.isnan(interval).any() else interval,
            fmt=marker,
            markersize=4,
            color=colour,
            capsize=2,
            alpha=1.0 if pooling == profile.pooling else 0.55,
            label=f"{pooling} pooling",
        )
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
            fontsize=8,
            color=INK,
        )
    hidden = layers[~profile.above_floor]
    if len(hidden):
        axes.plot(hidden, profile.rho[hidden], "x", color="red", label="not above rounding")
    log_axis(axes)
    axes.margins(y=0.12)
    axes.set_ylabel("contraction factor ρ")
    axes.legend(frameon=False, fontsize=8)
    depth_axis(axes, len(layers))
    return svg(figure)


def growth_figure(profiles: Sequence[ContractionProfile]) -> str:
    """Above: growth of error and state of the first profile, whose quotient is ρ. Below: ρ at every ε."""
    figure, (growth, factor) = panels(9, 5.4, 2)
    first = profiles[0]
    layers = np.arange(len(first.rho))
    for values, label, colour, marker in (
        (first.error_growth, "error, Σ‖e‖² after / before", COLOURS["bi"], "s"),
        (first.state_growth, "state, Σ‖h‖² after / before", COLOURS["blend"], "o"),
    ):
        growth.plot(layers, values, f"-{marker}", markersize=4, linewidth=0.8, color=colour, label=label)
    growth.set_ylabel("growth")
    for profile, colour, marker in zip(profiles, COLOURS.values(), "os^Dv", strict=False):
        factor.plot(layers, profile.rho, marker, markersize=4, color=colour, label=f"ε = {profile.epsilon:g}")
    factor.set_ylabel("contraction factor ρ")
    for axes in (growth, factor):
        axes.axhline(1, color=GREY, linewidth=0.8)
        log_axis(axes)
        axes.legend(frameon=False, fontsize=8)
    depth_axis(factor, len(layers))
    return svg(figure)


def influence_figure(profile: InfluenceProfile) -> str:
    """Block Influence of every layer with its standard error, on a logarithmic axis."""
    figure, axes = one_panel(9, 3.2)
    layers = np.arange(len(profile.influence))
    spread = None if np.isnan(profile.spread).any() else profile.spread
    axes.bar(layers, profile.influence, yerr=spread, color=COLOURS["bi"], width=0.7, error_kw={"linewidth": 0.8})
    log_axis(axes)
    axes.set_ylabel("Block Influence, 1 − cos")
    depth_axis(axes, len(layers))
    return svg(figure)


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
    axes.legend(frameon=False, fontsize=8, ncols=2)
    depth_axis(axes, layers)
    axes.set_xlabel("first layer of the run")
    return svg(figure)


def sublayer_figure(measured: SublayerInfluence) -> str:
    """Block Influence of attention and MLP side by side, with standard errors, on a logarithmic axis."""
    figure, axes = one_panel(9, 3.2)
    layers = np.arange(len(measured.attention))
    for offset, values, spread, label, colour in (
        (-0.2, measured.attention, measured.attention_spread, "attention", COLOURS["rho"]),
        (0.2, measured.mlp, measured.mlp_spread, "MLP", COLOURS["bi"]),
    ):
        bars = None if np.isnan(spread).all() else spread
        axes.bar(layers + offset, values, yerr=bars, color=colour, width=0.38, error_kw={"linewidth": 0.8}, label=label)
    log_axis(axes)
    axes.set_ylabel("Block Influence, 1 − cos")
    axes.legend(frameon=False, fontsize=8)
    depth_axis(axes, len(layers))
    return svg(figure)


def ranking_figure(plans: Mapping[str, PruningPlan]) -> str:
    """One strip a criterion: every layer with its rank (1 goes first), the removed ones filled."""
    figure, axes = one_panel(9, 0.9 + 0.5 * len(plans))
    for row, (name, plan) in enumerate(plans.items()):
        ranks = np.argsort(np.argsort(plan.scores, kind="stable")) + 1
        for layer, rank in enumerate(ranks):
            removed = layer in plan.touched
            axes.add_patch(
                matplotlib.patches.Rectangle(
                    (layer - 0.46, row - 0.42),
                    0.92,
                    0.84,
                    facecolor=COLOURS.get(name, GREY) if removed else "white",
                    edgecolor=COLOURS.get(name, GREY),
                    linewidth=0.8,
                )
            )
            axes.text(
                layer,
                row,
                "–" if np.isnan(plan.scores[layer]) else str(rank),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if removed else INK,
            )
    axes.set_yticks(range(len(plans)), [f"{name}" for name in plans])
    axes.set_ylim(len(plans) - 0.45, -0.55)
    count = len(next(iter(plans.values())).scores)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    depth_axis(axes, count)
    return svg(figure)


def perplexity_figure(curve: RemovalCurve) -> str:
    """Perplexity over the number of layers removed, one line a criterion, with paired intervals."""
    figure, axes = one_panel(6.5, 3.8)
    dense = curve.dense.perplexity
    axes.axhline(dense, color=GREY, linewidth=0.8, label=f"dense, {dense:.3g}")
    criteria = list(dict.fromkeys(row.criterion for row in curve.rows[1:]))
    for position, criterion in enumerate(criteria):
        rows = sorted((r for r in curve.rows if r.criterion == criterion), key=lambda r: len(r.removed))
        x = np.array([len(r.removed) for r in rows]) + 0.06 * (position - (len(criteria) - 1) / 2)
        y = np.array([r.perplexity for r in rows])
        bars = np.abs(np.array([[dense * r.low, dense * r.high] for r in rows]).T - y)
        axes.errorbar(
            x,
            y,
            yerr=None if np.isnan(bars).any() else bars,
            marker="o",
            markersize=4,
            capsize=2,
            color=COLOURS.get(criterion),
            label=criterion,
        )
    log_axis(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layers removed")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def speed_figure(speed: Speed) -> str:
    """Tokens per second relative to the first model, with quartiles and the numbers on the bars."""
    figure, axes = one_panel(6.5, 0.9 + 0.55 * len(speed.rows))
    first = speed.rows[0]
    for offset, what, label, colour in (
        (-0.18, "prefill", "prefill", COLOURS["rho"]),
        (0.18, "decode", "cached decoding", COLOURS["bi"]),
    ):
        ratios = [getattr(r, what) / getattr(first, what) for r in speed.rows]
        quartiles = np.array([getattr(r, f"{what}_quartiles") for r in speed.rows]).T / getattr(first, what)
        y = np.arange(len(speed.rows)) + offset
        axes.barh(y, ratios, height=0.34, color=colour, alpha=0.85, label=label)
        axes.errorbar(ratios, y, xerr=np.abs(quartiles - ratios), fmt="none", ecolor=INK, elinewidth=0.8)
        for row, position, edge in zip(speed.rows, y, quartiles[1], strict=True):
            axes.text(edge + 0.015, position, f"{getattr(row, what):.1f} tok/s", va="center", fontsize=8)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(speed.rows)), [r.model for r in speed.rows])
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlabel(f"speed, × {first.model}")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return svg(figure)
