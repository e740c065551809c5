"""What the figures share: colours, axes, and SVG text that is the same for the same result."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle, zip_longest
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito: told apart with any colour vision.
COLOURS = {
    "rho": "#0072B2",
    "rho, token pooling": "#E69F00",
    "bi": "#D55E00",
    "blend": "#009E73",
    "from-end": "#CC79A7",
    "random": "#999999",
}
INK, GREY = "#222222", "#888888"
STYLES = ((COLOURS["rho"], "o"), (COLOURS["bi"], "s"), (COLOURS["blend"], "^"), (COLOURS["from-end"], "D"))
SMALL = 8.5  # points, the smallest text: 11 pixels on the page


def one_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, in inches."""
    figure, (axes,) = panels(width, height, 1)
    return figure, axes


def panels(width: float, height: float, count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` pairs of axes below each other that share their horizontal axis."""
    figure, column = grid(width, height, count, 1)
    for axes in column[:-1]:
        axes.sharex(column[-1])
        axes.tick_params(labelbottom=False)
    return figure, column


def grid(width: float, height: float, count: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` pairs of axes in rows of `columns`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    cells = [figure.add_subplot(-(-count // columns), columns, i + 1) for i in range(count)]
    for axes in cells:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, cells


def with_intervals(axes: Axes, x: np.ndarray, y: np.ndarray, ends: np.ndarray, **style: Any) -> None:
    """Points with bars to their `ends` (n, 2); without bars if an end is not finite."""
    bars = np.abs(ends - y[:, None]).T
    axes.errorbar(x, y, yerr=bars if np.isfinite(bars).all() else None, markersize=4, capsize=2, **style)


def depth_axis(axes: Axes, layers: int) -> None:
    """The horizontal axis is the layers 0 … layers − 1."""
    axes.set_xlim(-0.7, layers - 0.3)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))


def log_axis(axes: Axes, which: str = "y") -> None:
    """A logarithmic axis labelled in plain numbers: at 1, 2 and 5, at powers of ten if it spans many decades, at
    round steps if it spans less than one."""
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    low, high = sorted(axes.get_ylim() if which == "y" else axes.get_xlim())
    axis = axes.yaxis if which == "y" else axes.xaxis
    if high < 5 * low:
        axis.set_major_locator(MaxNLocator(5))
    else:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high < 1e4 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


class Panel(NamedTuple):
    """One pair of axes of `over`: `lines` by their labels, of which those with `bars` have them, up and down.

    `dashed` are estimates, each in the colour of the line in its place. On a logarithmic axis a change of nothing at
    all has no point.
    """

    y: str
    lines: Mapping[str, np.ndarray]
    log: bool = False
    bars: Sequence[np.ndarray] = ()
    dashed: Sequence[np.ndarray] = ()
    limits: tuple[float | None, float | None] = (None, None)


def over(axis: str, height: float, *drawn: Panel) -> str:
    """The `svg` of panels below each other over one axis of the result: its layers, or its decoding steps."""
    figure, column = panels(9, height, len(drawn))
    styles, taken = cycle(STYLES), dict[str, tuple[str, str]]()
    for axes, panel in zip(column, drawn, strict=True):
        known = [label for label, values in panel.lines.items() if np.isfinite(values).any()]
        for (label, values), bars, dashed in zip_longest(panel.lines.items(), panel.bars, panel.dashed):
            colour, marker = taken.get(label) or next(styles)
            if label:  # the same in every panel
                taken[label] = colour, marker
            places = np.arange(len(values))
            if label in known:
                bars = None if bars is None or np.isnan(bars).all() else bars
                style: dict[str, Any] = {"fmt": f"-{marker}", "markersize": 4, "linewidth": 0.9, "capsize": 2}
                axes.errorbar(places, shown(values, panel.log), yerr=bars, color=colour, label=label, **style)
            if dashed is not None:
                axes.plot(places, shown(dashed, panel.log), "--", linewidth=0.8, color=colour)
        if panel.log and any((values > 0).any() for values in panel.lines.values()):
            log_axis(axes)
        axes.set_ylim(*panel.limits)
        axes.set_ylabel(panel.y)
        if any(known):
            axes.legend(frameon=False, fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    depth_axis(column[-1], len(places))
    column[-1].set_xlabel(axis)
    return svg(figure)


def shown(values: Any, log: bool = True) -> np.ndarray:
    """What a linear or a logarithmic axis can show of `values`; NaN for the others."""
    return np.where(np.isfinite(values) & ((values > 0) | (not log)), values, np.nan)


def over_depth(figure: Figure, axes: Axes, layers: int, y: str, **legend: Any) -> str:
    """The `svg` of a figure whose lowest axes go over the layers, with a legend."""
    depth_axis(axes, layers)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=SMALL, **legend)
    return svg(figure)


def labelled(figure: Figure, axes: Axes, x: str, y: str) -> str:
    """The `svg` of a figure whose axes get these labels and a legend."""
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, fontsize=SMALL)
    return svg(figure)


def by_rows(figure: Figure, axes: Axes, names: Sequence[str], x: str) -> str:
    """The `svg` of a figure with a row of bars for each name, the first above, and a legend if the bars have labels."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=SMALL, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return svg(figure)


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element. A fixed salt and no date: the same result gives the same text."""
    buffer = io.StringIO()
    for words in figure.findobj(Text):  # names are text: between two $ matplotlib would read mathematics
        words.set_parse_math(False)
    # Labels of ticks are made when they are drawn.
    with matplotlib.rc_context({"svg.hashsalt": "lyapunov-prune", "svg.fonttype": "none", "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
