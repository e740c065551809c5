"""Two models that write from the same prompts: how alike their steps are, and for how long their texts."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lyapunov_prune.attention_error import AttentionPaths
from lyapunov_prune.generation import GenerationDivergence
from lyapunov_prune.report.drawing import COLOURS, GREY, INK, log_axis, panels, svg


def generation_figure(measured: GenerationDivergence) -> str:
    """Above: cosine similarity per step in the three spaces. Below: the share of texts still the same, and of those
    that neither model has ended."""
    figure, (similarity, share) = panels(9, 5.4, 2)
    steps = np.arange(len(measured.kl))
    for values, label, colour, marker in (
        (measured.state_similarity, "state", COLOURS["blend"], "o"),
        (measured.logit_similarity, "logits", COLOURS["rho"], "s"),
        (measured.probability_similarity, "probabilities", COLOURS["bi"], "^"),
    ):
        if np.isfinite(values).any():
            similarity.plot(steps, values, f"-{marker}", markersize=3, linewidth=0.9, color=colour, label=label)
    similarity.set_ylim(min(0.0, similarity.get_ylim()[0]), 1.03)
    similarity.set_ylabel("cosine similarity")
    for values, label, colour, style in (
        (measured.same_text, "texts still the same", INK, "-"),
        (measured.running, "texts not ended", GREY, "--"),
    ):
        share.step(steps, 100 * values, style, where="mid", color=colour, linewidth=1.2, label=label)
    share.set_ylim(-3, 103)
    share.set_ylabel("prompts, %")
    for axes in (similarity, share):
        axes.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.14), ncols=3)
    share.set_xlabel("decoding step")
    share.set_xlim(-0.5, len(steps) - 0.5)
    share.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return svg(figure)


def paths_figure(measured: AttentionPaths) -> str:
    """Above: the two paths and the whole change of attention's output by layer. Below, by step: how much of the weights
    and of the change belongs to the prompt. Bands are the middle half of the other axis."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    by_layer, by_step = figure.subplots(2, 1)
    layers, steps = np.array(measured.layers), np.arange(measured.value.shape[-1])
    for values, label, colour, marker in (
        (measured.total, "whole change", INK, "o"),
        (measured.value, "value path", COLOURS["rho"], "s"),
        (measured.weight, "weight path", COLOURS["bi"], "^"),
    ):
        _band(by_layer, layers, values, label, colour, marker)
    if measured.total.any():
        log_axis(by_layer)
    by_layer.set_ylabel("norm / dense output")
    by_layer.set_xlabel("layer")
    for values, label, colour, marker in (
        (measured.prompt_weight, "attention to the prompt", COLOURS["blend"], "o"),
        (measured.prompt_share, "change that comes from the prompt", COLOURS["from-end"], "s"),
    ):
        _band(by_step, steps, 100 * values.T, label, colour, marker)
    by_step.set_ylim(-3, 103)
    by_step.set_ylabel("share, %")
    by_step.set_xlabel("decoding step")
    for axes in (by_layer, by_step):
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axes.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.14), ncols=3)
    return svg(figure)


def _band(axes: Axes, x: np.ndarray, values: np.ndarray, label: str, colour: str, marker: str) -> None:
    """Mean and middle half of each row."""
    seen = values[:, np.isfinite(values).any(0)]
    if not seen.size:  # two equal models
        return
    low, high = np.nanquantile(seen, [0.25, 0.75], axis=1)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, np.nanmean(seen, axis=1), f"-{marker}", markersize=3, linewidth=0.9, color=colour, label=label)
