"""The figures of the experiment on three spaces: estimates beside measurements, over depth, steps and temperatures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from lyapunov_prune.report.drawing import COLOURS, INK, depth_axis, log_axis, panels, svg

NAMES = {"attention": "attention", "mlp": "MLP"}
PRUNED = "pruned to half by Wanda"
# What is estimated (Figures 14 to 17), as the axes name it.
ESTIMATED = {
    "kl": "KL(p‖q), nats",
    "probability": "1 − cos(p, q)",
    "hidden": "1 − cos, state h",
    "logit": "1 − cos, logits z",
}
BITS = 8  # rounding to so many is a change small enough for the variance bound


def band(axes: Any, x: Any, table: pd.DataFrame, column: str, **style: Any) -> None:
    """A line and its interval over prompts."""
    axes.plot(x, positive(table[column]), **style)
    axes.fill_between(
        x,
        positive(table[f"{column}_low"]),
        positive(table[f"{column}_high"]),
        color=style["color"],
        alpha=0.2,
        linewidth=0,
    )


def positive(values: pd.Series) -> np.ndarray:
    return np.where(values > 0, values, np.nan)


def orthogonal_figure(layers: pd.DataFrame) -> str:
    """Figure 5 and 18: the part of the change across h, and across z, over depth."""
    figure, column = panels(9, 5.2, 2)
    for axes, what in zip(column, NAMES, strict=True):
        part = layers[layers.what == what]
        for name, label, colour, marker in (
            ("hidden_orthogonal", "state h", COLOURS["rho"], "o"),
            ("logit_orthogonal", "logits z", COLOURS["bi"], "s"),
        ):
            band(axes, part.layer, part, name, color=colour, marker=marker, markersize=3, linewidth=0.9, label=label)
        log_axis(axes)
        axes.set_ylabel(f"‖Δ⊥‖ / ‖v‖, {NAMES[what]}")
    column[0].legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    depth_axis(column[-1], int(layers.layer.max()) + 1)
    return svg(figure)


PAIRS = [(name, ESTIMATED[name]) for name in ("probability", "kl")]


def steps_figure(steps: pd.DataFrame, at: int) -> str:
    """Figure 6: measured and estimated at one attention, over decoding steps."""
    figure, column = panels(9, 5.2, 2)
    for axes, (name, label) in zip(column, PAIRS, strict=True):
        band(axes, steps.step, steps, name, color=COLOURS["rho"], marker="o", markersize=3, label="measured")
        estimate = f"{name}_estimate"
        band(axes, steps.step, steps, estimate, color=COLOURS["bi"], linestyle="--", label="second-order estimate")
        log_axis(axes)
        axes.set_ylabel(label)
    column[0].legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    column[-1].set_xlabel(f"decoding step, the attention of layer {at} left out")
    return svg(figure)


def steps_by_layer_figure(rows: pd.DataFrame) -> str:
    """Figures 14 to 17: measured, estimated and their quotient at every layer and step, an attention left out."""
    figure = Figure(figsize=(10, 11), layout="constrained")
    grid: Any = figure.subplots(len(ESTIMATED), 3, sharex=True, sharey=True)
    values = {name: np.stack(part.steps) for name, part in rows.sort_values("layer").groupby("measure")}
    for (first, second, third), (name, label) in zip(grid, ESTIMATED.items(), strict=True):
        pair = [np.where(values[n] > 0, values[n], np.nan) for n in (name, f"{name}_estimate")]
        scale = LogNorm(*np.nanquantile(pair, [0.005, 0.995]))
        for axes, shown in zip((first, second), pair, strict=True):
            image = axes.imshow(shown, norm=scale, cmap="viridis", aspect="auto", origin="lower")
        bar = figure.colorbar(image, ax=[first, second], extend="both")
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        quotient = third.imshow(pair[1] / pair[0], norm=LogNorm(1 / 8, 8), cmap="PuOr", aspect="auto", origin="lower")
        bar = figure.colorbar(quotient, ax=third, extend="both", ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8])
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        first.set_ylabel(f"{label}\nlayer")
    for axes, title in zip(grid[0], ("measured", "second-order estimate", "estimate / measured"), strict=True):
        axes.set_title(title, fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("decoding step")
    return svg(figure)


def variances_figure(layers: pd.DataFrame) -> str:
    """Figures 19 to 21: the variance of Δz by three weights, and that by r over the squared parts across h and z."""
    figure, column = panels(9, 10, 4)
    for (above, below), (what, name) in zip((column[:2], column[2:]), NAMES.items(), strict=True):
        part = layers[layers.what == what].copy()
        for estimate, variance in (("probability", "by_r"), ("kl", "by_p")):
            for end in ("", "_low", "_high"):
                part[f"{variance}{end}"] = 2 * part[f"{estimate}_estimate{end}"]
        for variance, label, colour, marker in (
            ("uniform_variance", "every token alike", COLOURS["random"], "^"),
            ("by_p", "weighed by p", COLOURS["bi"], "s"),
            ("by_r", "weighed by r = p²/‖p‖²", COLOURS["rho"], "o"),
        ):
            band(above, part.layer, part, variance, color=colour, marker=marker, markersize=3, label=label)
        above.set_ylabel(f"variance of Δz\n{name} left out")
        for space, label, colour in (("hidden", "(‖Δh⊥‖/‖h‖)²", COLOURS["blend"]), ("logit", "(‖Δz⊥‖/‖z‖)²", INK)):
            over = part.by_r / (2 * part[f"{space}_estimate"])
            below.plot(part.layer, positive(over), marker="o", markersize=3, color=colour, label=f"over {label}")
        below.set_ylabel(f"Var_r(Δz) over the\nsquared part, {name}")
        for axes in (above, below):
            log_axis(axes)
            axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    depth_axis(column[-1], int(layers.layer.max()) + 1)
    return svg(figure)


def temperatures_figure(table: pd.DataFrame, at: int) -> str:
    """Figure 11: the same over temperatures, means over steps."""
    figure, column = panels(6.5, 5.2, 2)
    for axes, (name, label) in zip(column, PAIRS, strict=True):
        for shown, colour, marker, legend in (
            (name, COLOURS["rho"], "o", "measured"),
            (f"{name}_estimate", COLOURS["bi"], "s", "second-order estimate"),
        ):
            bars = np.abs(table[[f"{shown}_low", f"{shown}_high"]].to_numpy().T - table[shown].to_numpy())
            axes.errorbar(
                table.temperature,
                table[shown],
                yerr=bars,
                marker=marker,
                markersize=4,
                capsize=2,
                color=colour,
                label=legend,
            )
        log_axis(axes)
        axes.set_ylabel(label)
    column[0].legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    column[-1].set_xlabel(f"temperature T, the attention of layer {at} left out")
    return svg(figure)


def bounds_figure(layers: pd.DataFrame, rounding: pd.DataFrame) -> str:
    """KL over depth with its estimate, and the bounds that hold whatever the change, or where c ≤ 1."""
    figure, column = panels(9, 7.4, 3)
    tables = {f"{NAMES[what]} left out": layers[layers.what == what] for what in NAMES}
    tables[f"rounded to {BITS} bits"] = rounding
    for axes, (name, part) in zip(column, tables.items(), strict=True):
        band(axes, part.layer, part, "range_bound", color=COLOURS["from-end"], linewidth=0.9, label="range bound")
        if "variance_bound" in part:
            axes.plot(part.layer, part.variance_bound, "+", color=COLOURS["bi"])
        band(
            axes,
            part.layer,
            part,
            "kl",
            color=COLOURS["rho"],
            marker="o",
            markersize=3,
            linewidth=0.9,
            label="measured",
        )
        axes.plot(part.layer, part.kl_estimate, "--", color=INK, linewidth=0.9, label="second-order estimate")
        log_axis(axes)
        axes.set_ylabel(f"KL(p‖q), nats\n{name}")
    column[0].plot([], [], "+", color=COLOURS["bi"], label="variance bound, steps with c ≤ 1")
    column[0].legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    depth_axis(column[-1], int(layers.layer.max()) + 1)
    return svg(figure)
