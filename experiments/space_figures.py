"""The figures of experiment 16: estimates beside measurements, over depth, steps and temperatures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from lyapunov_prune.report.drawing import COLOURS, INK, depth_axis, log_axis, panels, svg

NAMES = {"attention": "attention", "mlp": "MLP"}
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


PAIRS = (("probability", "1 − cos(p, q)"), ("kl", "KL(p‖q), nats"))


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
