"""Figures of a sensitivity map: what each change did to the perplexity."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from lyapunov_prune.report.drawing import (
    COLOURS,
    GREY,
    SMALL,
    depth_axis,
    grid,
    labelled,
    log_axis,
    one_panel,
    over_depth,
    svg,
    with_intervals,
)
from lyapunov_prune.results.frames import pd
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

_LINES = (*COLOURS.values(), "#56B4E9")
# Loss that no map needs to tell apart from none: a thousandth of a nat, 0.1 % of the perplexity.
_FAINT = 1e-3
_RATIO = "perplexity / dense"


def sensitivity_figures(s: Sensitivity) -> dict[str, str]:
    """Every figure that the studies of `s` allow, by name."""
    have = {e.study for e in s.effects}
    drawn = {}
    if "group" in have:
        drawn["sensitivity-map"] = heat_map(s)
    if have & {"layer", "removal"}:
        drawn["sensitivity-layers"] = layers_figure(s)
    if "component" in have:
        drawn["sensitivity-components"] = components_figure(s)
    if have & {"forward", "backward"}:
        drawn["sensitivity-cumulative"] = cumulative_figure(s)
    if have & {"sparsity", "rank", "layer0", "threshold"}:
        drawn["sensitivity-levels"] = levels_figure(s)
    if "cliff" in have:
        drawn["sensitivity-cliff"] = cliff_figure(s)
    if have & {"greedy", "greedy-rescored"}:
        drawn["sensitivity-greedy"] = greedy_figure(s)
    if len(s.correlations()):
        drawn["sensitivity-predictors"] = predictors_figure(s)
    return drawn


def heat_map(s: Sensitivity) -> str:
    """Increase of the loss for every component of every layer, on a logarithmic colour scale."""
    frame = s.of("group").assign(loss=[(e.windows - s.dense).mean() for e in s.effects if e.study == "group"])
    table = frame.pivot(index="component", columns="layer", values="loss").reindex(frame.component.unique())
    figure, axes = one_panel(9, 1.3 + 0.34 * len(table))
    values = table.to_numpy(dtype=float)
    top = float(np.max(values, where=np.isfinite(values), initial=10 * _FAINT))
    picture = axes.pcolormesh(
        np.arange(values.shape[1] + 1) - 0.5,
        np.arange(len(table) + 1) - 0.5,
        np.where(np.isnan(values), np.nan, np.clip(values, _FAINT, top)),
        norm=LogNorm(_FAINT, top),
        cmap="viridis",
        edgecolor="white",
        linewidth=0.6,
    )
    axes.set_facecolor("#dddddd")  # no such matrix there, or no number
    axes.set_yticks(range(len(table)), list(table.index))
    axes.invert_yaxis()
    depth_axis(axes, values.shape[1])
    axes.set_xlim(-0.5, values.shape[1] - 0.5)
    bar = figure.colorbar(picture, ax=axes, pad=0.01, extend="min")
    bar.set_label("increase of the loss, nats")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    return svg(figure)


def layers_figure(s: Sensitivity) -> str:
    """Perplexity with one whole layer compressed, or removed, with paired intervals."""
    figure, axes = one_panel(9, 3.4)
    _line(axes, s.of("layer"), "layer", f"compressed: {s.compression}", COLOURS["rho"], "o")
    _line(axes, s.of("removal"), "layer", "removed", COLOURS["bi"], "s")
    return _over_depth(s, axes, figure)


def components_figure(s: Sensitivity) -> str:
    """Perplexity with one component compressed in all layers."""
    rows = s.of("component").sort_values("degradation")
    figure, axes = one_panel(6.5, 0.9 + 0.3 * len(rows))
    axes.barh(rows.label, rows.degradation, color=COLOURS["rho"], height=0.7)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_RATIO)
    for y, value in enumerate(rows.degradation):
        axes.text(value, y, f" {value:.3g}", va="center", fontsize=SMALL)
    axes.margins(x=0.15)
    return svg(figure)


def cumulative_figure(s: Sensitivity) -> str:
    """Perplexity over the number of layers compressed, from the first on and from the last back."""
    first, last = s.of("forward"), s.of("backward")
    figure, axes = one_panel(6.5, 3.6)
    _line(axes, first.assign(count=_counted(first)), "count", "from the first layer on", COLOURS["bi"], "o")
    _line(axes, last.assign(count=_counted(last)), "count", "from the last layer back", COLOURS["rho"], "s")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _ratios(figure, axes, f"layers compressed ({s.compression})")


def levels_figure(s: Sensitivity) -> str:
    """Perplexity over sparsity or bits (all layers, or the first alone) and over the rank kept in all layers."""
    by_amount = (
        ("sparsity", f"all layers, {s.compression.method}", COLOURS["rho"], "o"),
        ("layer0", f"layer 0, {s.compression.method}{_truncated(s)}", COLOURS["bi"], "s"),
    )
    threshold = (("threshold", "layer 0, wanda", COLOURS["blend"], "^"),)
    by_rank = (("rank", "all layers, sparsity 0", COLOURS["rho"], "o"),)
    have = {e.study for e in s.effects}
    asked = (
        (("bits", by_amount), ("sparsity", threshold), ("rank", by_rank))
        if s.compression.rounds
        else (("sparsity", (*by_amount, *threshold)), ("rank", by_rank))
    )
    drawn = [(x, lines) for x, lines in asked if have & {study for study, *_ in lines}]
    figure, all_axes = grid(1 + 4.5 * len(drawn), 3.4, len(drawn), len(drawn))
    for axes, (x, lines) in zip(all_axes, drawn, strict=True):
        for study, label, colour, marker in lines:
            _line(axes, s.of(study), x, label, colour, marker)
        axes.set_xlabel("rank kept" if x == "rank" else x)
        if x == "rank":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        _even(axes)
        axes.set_ylabel(_RATIO)
        axes.legend(frameon=False, fontsize=SMALL)
    return svg(figure)


def cliff_figure(s: Sensitivity) -> str:
    """The most sensitive component, layer by layer, at several levels."""
    figure, axes = one_panel(9, 3.6)
    frame = s.of("cliff")
    level = "bits" if s.compression.rounds else "sparsity"
    for (amount, rows), colour in zip(frame.groupby(level), _LINES, strict=False):
        axes.plot(rows.layer, rows.degradation, marker="o", markersize=3.5, color=colour, label=f"{level} {amount:g}")
    axes.set_title(f"{frame.component.iloc[0]}{_truncated(s)}", fontsize=9)
    return _over_depth(s, axes, figure)


def greedy_figure(s: Sensitivity) -> str:
    """Perplexity over the share of multiplications saved, group after group; rounding saves none: over their number."""
    once, again = (
        rows.assign(taken=_counted(rows) if s.compression.rounds else 100 * rows.saved)
        for rows in (s.of("greedy"), s.of("greedy-rescored"))
    )
    figure, axes = one_panel(6.5, 3.6)
    _line(axes, once, "taken", "in the order of their own regret", COLOURS["rho"], "o")
    _line(axes, again, "taken", "scored again after each", COLOURS["bi"], "s")
    taken = "groups rounded" if s.compression.rounds else "multiplications of the layers' matrices saved, %"
    return _ratios(figure, axes, taken)


def predictors_figure(s: Sensitivity) -> str:
    """What was measured against what may predict it, one point a layer."""
    rows = s.correlations()
    figure, all_axes = grid(9, 2.6 * -(-len(rows) // 3), len(rows), 3)
    frame = s.to_frame()
    for axes, row in zip(all_axes, rows.itertuples(), strict=True):
        measured, study = row.measured.split(", ")
        values = frame[(frame.study == study) & frame.layer.notna()].groupby("layer")[measured].mean()
        axes.scatter(s.scores[row.against][values.index.to_numpy(dtype=int)], values, s=14, color=COLOURS["rho"])
        axes.set_xscale("log")
        if measured == "regret":
            axes.set_yscale("symlog", linthresh=0.1)
        else:
            axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.margins(0.08)
        axes.set_xlabel(row.against, fontsize=SMALL)
        axes.set_ylabel(row.measured, fontsize=SMALL)
        axes.tick_params(labelsize=SMALL)
        axes.set_title(f"Spearman {row.spearman:+.2f}, p = {row.p:.2g}", fontsize=SMALL)
    return svg(figure)


def _truncated(s: Sensitivity) -> str:
    """To which rank, beside a sparsity; a method of low rank has one of its own, and one that rounds has none."""
    return "" if s.compression.low_rank or s.compression.rounds else f", rank {s.compression.rank or 'full'}"


def _line(axes: Axes, rows: pd.DataFrame, x: str, label: str, colour: str, marker: str) -> None:
    if not rows.empty:
        places, ends = rows[x].to_numpy(dtype=float), rows[["low", "high"]].to_numpy()
        style = {"fmt": f"-{marker}", "linewidth": 1, "color": colour, "label": label}
        with_intervals(axes, places, rows.degradation.to_numpy(), ends, **style)


def _counted(rows: pd.DataFrame) -> np.ndarray:
    return np.arange(1, len(rows) + 1)


def _even(axes: Axes) -> None:
    """A logarithmic axis of ratios, with a line where nothing changed."""
    axes.axhline(1, color=GREY, linewidth=0.8)
    log_axis(axes)


def _ratios(figure: Figure, axes: Axes, x: str) -> str:
    _even(axes)
    return labelled(figure, axes, x, _RATIO)


def _over_depth(s: Sensitivity, axes: Axes, figure: Figure) -> str:
    _even(axes)
    return over_depth(figure, axes, s.measured_on.model.num_layers, _RATIO)
