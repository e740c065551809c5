"""Figures as SVG text, one function a figure, from saved results."""

from __future__ import annotations

import io
from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lyapunov_prune.contraction import ContractionProfile
from lyapunov_prune.evaluation.removal import RemovalCurve
from lyapunov_prune.evaluation.speed import Speed
from lyapunov_prune.influence import InfluenceProfile
from lyapunov_prune.plan import PruningPlan

# Okabe and Ito: told apart with any colour vision.
COLOURS = {
    "rho": "#0072B2",
    "rho, token pooling": "#E69F00",
    "bi": "#D55E00",
    "blend": "#009E73",
    "from-end": "#CC79A7",
    "random": "#999999",
}
_INK, _GREY = "#222222", "#888888"


def contraction_figure(profile: ContractionProfile) -> str:
    """ρ of every layer with its interval, on a logarithmic axis, and the other pooling beside it."""
    figure, axes = _figure(9, 3.6)
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
    axes.axhline(1, color=_GREY, linewidth=0.8)
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
            color=_INK,
        )
    hidden = layers[~profile.above_floor]
    if len(hidden):
        axes.plot(hidden, profile.rho[hidden], "x", color="red", label="not above rounding")
    _log_axis(axes)
    axes.margins(y=0.12)
    axes.set_ylabel("contraction factor ρ")
    axes.legend(frameon=False, fontsize=8)
    _depth_axis(axes, len(layers))
    return _svg(figure)


def influence_figure(profile: InfluenceProfile) -> str:
    """Block Influence of every layer with its standard error, on a logarithmic axis."""
    figure, axes = _figure(9, 3.2)
    layers = np.arange(len(profile.influence))
    spread = None if np.isnan(profile.spread).any() else profile.spread
    axes.bar(layers, profile.influence, yerr=spread, color=COLOURS["bi"], width=0.7, error_kw={"linewidth": 0.8})
    _log_axis(axes)
    axes.set_ylabel("Block Influence, 1 − cos")
    _depth_axis(axes, len(layers))
    return _svg(figure)


def ranking_figure(plans: Mapping[str, PruningPlan]) -> str:
    """One strip a criterion: every layer with its rank (1 goes first), the removed ones filled."""
    figure, axes = _figure(9, 0.9 + 0.5 * len(plans))
    for row, (name, plan) in enumerate(plans.items()):
        ranks = np.argsort(np.argsort(plan.scores, kind="stable")) + 1
        for layer, rank in enumerate(ranks):
            removed = layer in plan.remove
            axes.add_patch(
                matplotlib.patches.Rectangle(
                    (layer - 0.46, row - 0.42),
                    0.92,
                    0.84,
                    facecolor=COLOURS.get(name, _GREY) if removed else "white",
                    edgecolor=COLOURS.get(name, _GREY),
                    linewidth=0.8,
                )
            )
            axes.text(
                layer,
                row,
                str(rank),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if removed else _INK,
            )
    axes.set_yticks(range(len(plans)), [f"{name}" for name in plans])
    axes.set_ylim(len(plans) - 0.45, -0.55)
    count = len(next(iter(plans.values())).scores)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    _depth_axis(axes, count)
    return _svg(figure)


def perplexity_figure(curve: RemovalCurve) -> str:
    """Perplexity over the number of layers removed, one line a criterion, with paired intervals."""
    figure, axes = _figure(6.5, 3.8)
    dense = curve.dense.perplexity
    axes.axhline(dense, color=_GREY, linewidth=0.8, label=f"dense, {dense:.3g}")
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
    _log_axis(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layers removed")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def speed_figure(speed: Speed) -> str:
    """Tokens per second relative to the first model, with quartiles and the numbers on the bars."""
    figure, axes = _figure(6.5, 0.9 + 0.55 * len(speed.rows))
    first = speed.rows[0]
    for offset, what, label, colour in (
        (-0.18, "prefill", "prefill", COLOURS["rho"]),
        (0.18, "decode", "cached decoding", COLOURS["bi"]),
    ):
        ratios = [getattr(r, what) / getattr(first, what) for r in speed.rows]
        quartiles = np.array([getattr(r, f"{what}_quartiles") for r in speed.rows]).T / getattr(first, what)
        y = np.arange(len(speed.rows)) + offset
        axes.barh(y, ratios, height=0.34, color=colour, alpha=0.85, label=label)
        axes.errorbar(ratios, y, xerr=np.abs(quartiles - ratios), fmt="none", ecolor=_INK, elinewidth=0.8)
        for row, position, edge in zip(speed.rows, y, quartiles[1], strict=True):
            axes.text(edge + 0.015, position, f"{getattr(row, what):.1f} tok/s", va="center", fontsize=8)
    axes.axvline(1, color=_GREY, linewidth=0.8)
    axes.set_yticks(range(len(speed.rows)), [r.model for r in speed.rows])
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlabel(f"speed, × {first.model}")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return _svg(figure)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _depth_axis(axes: Axes, layers: int) -> None:
    axes.set_xlim(-0.7, layers - 0.3)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))


def _log_axis(axes: Axes) -> None:
    """A logarithmic y axis labelled in plain numbers, at 1, 2 and 5 unless it spans many decades."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high < 1e4 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # A fixed salt and no date: the same result gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "lyapunov-prune", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
