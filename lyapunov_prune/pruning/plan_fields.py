"""What the fields of a plan have to fulfil."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.results.arrays import require_array
from lyapunov_prune.results.result import ModelIdentity


def layer_list(given: tuple[int, ...], model: ModelIdentity) -> tuple[int, ...]:
    """`given` in ascending order; raises LyapunovPruneError unless it names layers of `model`, each once."""
    if any(isinstance(i, bool) or not isinstance(i, int | np.integer) for i in given):
        raise LyapunovPruneError(f"layer indices must be integers, got {list(given)}")
    outside = [i for i in given if not 0 <= i < model.num_layers]
    if outside:
        raise LyapunovPruneError(
            f"layer {outside[0]} does not exist: {model.name} has layers 0 to {model.num_layers - 1}"
        )
    repeated = sorted({i for i in given if given.count(i) > 1})
    if repeated:
        raise LyapunovPruneError(f"layer {repeated[0]} is named more than once; name each layer once")
    return tuple(sorted(int(i) for i in given))


def require_experts(
    experts: Sequence[Sequence[int]], routed: np.ndarray | None, model: ModelIdentity, without: Collection[int]
) -> None:
    """Raise LyapunovPruneError unless `experts` and `routed` fit each other and the rest of the plan.

    `without` are the layers that lose their MLP, or all.
    """
    layers, counts = model.num_layers, {len(gone) for gone in experts} - {0}
    if experts and len(experts) != layers:
        raise LyapunovPruneError(
            f"plan, experts: {len(experts)} entries and {model.name} has {layers} layers; give one a layer, empty "
            "where none goes"
        )
    if len(counts) > 1:
        raise LyapunovPruneError(
            f"plan, experts: {min(counts)} go from one layer and {max(counts)} from another, and a config gives "
            "one number for all layers; remove as many from each"
        )
    for layer, gone in enumerate(experts):
        if any(a >= b for a, b in pairwise(gone)) or any(expert < 0 for expert in gone):
            raise LyapunovPruneError(
                f"plan, experts: {list(gone)} of layer {layer}; name each once, ascending, counted from 0"
            )
        if gone and layer in without:
            raise LyapunovPruneError(f"layer {layer} loses its experts with the rest of it; name it once")
    if routed is not None:
        require_array("plan, routed", routed, (layers,), most=1 + 1e-9, finite=False)


def require_channels(
    channels: Sequence[Sequence[Sequence[int]]],
    widths: Sequence[Sequence[int]],
    model: ModelIdentity,
    removed: Collection[int],
) -> None:
    """Raise LyapunovPruneError unless known channels leave units of the layers that are not `removed`.

    Units of the same width that lose channels lose the same number, one or more but not all.
    """
    layers = model.num_layers
    twice = next((i for i, here in enumerate(channels) if i in removed and any(here)), None)
    if twice is not None:
        raise LyapunovPruneError(f"layer {twice} loses its channels with the rest of it; name it once")
    if len(channels) != layers or [*map(len, channels)] != [*map(len, widths)]:
        raise LyapunovPruneError(
            f"plan, channels: lists of {len(channels)} and widths of {len(widths)} of {layers} layers; give a list and "
            "a width for every unit of every layer, or make it again"
        )
    counts: dict[int, int] = {}
    for layer, (here, sizes) in enumerate(zip(channels, widths, strict=True)):
        for gone, width in zip(here, sizes, strict=True):
            if not gone:
                continue
            if list(gone) != sorted(set(gone)) or not 0 <= gone[0] <= gone[-1] < width:
                raise LyapunovPruneError(
                    f"plan, channels: those of layer {layer} are not ascending numbers below {width}; make it again"
                )
            if counts.setdefault(width, len(gone)) != len(gone) or len(gone) == width:
                raise LyapunovPruneError(
                    f"plan, channels: {len(gone)} of {width} channels leave a unit of layer {layer} and "
                    f"{counts[width]} others, and the same number, but not all, leaves each; make it again"
                )
    if not counts:
        raise LyapunovPruneError("plan, channels: no unit of a kept layer loses channels; make it again")


def require_reduction(activations: Sequence[int], reduction: str | None) -> None:
    """Raise LyapunovPruneError unless activations that go, and they alone, have one of REDUCTIONS."""
    if reduction is not None and not activations:
        raise LyapunovPruneError(f"reduction {reduction} is of dropped activations, and none is; name them or leave it")
    if activations and reduction not in REDUCTIONS:
        said = "without a reduction" if reduction is None else f"by the unknown reduction {reduction!r}"
        raise LyapunovPruneError(f"activations cannot be dropped {said}; give one of {', '.join(REDUCTIONS)}")
