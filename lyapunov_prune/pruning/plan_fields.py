"""What the fields of a plan have to fulfil."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.results.arrays import require_array, require_fitting
from lyapunov_prune.results.result import ModelIdentity


def require_experts(
    experts: Sequence[Sequence[int]], routed: np.ndarray | None, model: ModelIdentity, without: Collection[int]
) -> None:
    """Raise LyapunovPruneError unless `experts` and `routed` fit each other and the rest of the plan.

    `without` are the layers that lose their MLP, or all.
    """
    if fault := next(_faults(experts, model, without), ""):
        raise LyapunovPruneError(f"plan, experts: {fault}")
    if routed is not None:
        require_array("plan, routed", routed, (model.num_layers,), most=1 + 1e-9, finite=False)


def _faults(experts: Sequence[Sequence[int]], model: ModelIdentity, without: Collection[int]) -> Iterator[str]:
    layers, counts = model.num_layers, {len(gone) for gone in experts} - {0}
    if experts and len(experts) != layers:
        yield f"{len(experts)} entries and {model.name} has {layers} layers; give one per layer, empty for none"
    if len(counts) > 1:
        yield (
            f"{min(counts)} are removed from one layer and {max(counts)} from another, but a config has one number for "
            "all layers; remove the same number from each"
        )
    for layer, gone in enumerate(experts):
        if any(a >= b for a, b in pairwise(gone)) or any(expert < 0 for expert in gone):
            yield f"{list(gone)} of layer {layer}; name each once, ascending, counted from 0"
        if gone and layer in without:
            yield f"layer {layer} is removed with its experts; name it once"


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
    alike = len(channels) == layers and [*map(len, channels)] == [*map(len, widths)]
    require_fitting(alike, f"plan, channels: every unit of the {layers} layers has a list and a width")
    whole = not any(any(here) for layer, here in enumerate(channels) if layer in removed)
    require_fitting(whole, "plan, channels: a layer that goes whole loses channels too")
    counts: dict[int, int] = {}
    for layer, (here, sizes) in enumerate(zip(channels, widths, strict=True)):
        for gone, width in zip(here, sizes, strict=True):
            if not gone:
                continue
            ascending = list(gone) == sorted(set(gone)) and 0 <= gone[0] <= gone[-1] < width
            require_fitting(ascending, f"plan, channels: those of layer {layer} ascend below {width}")
            same = counts.setdefault(width, len(gone)) == len(gone) < width
            require_fitting(
                same,
                f"plan, channels: {len(gone)} of {width} channels leave a unit of layer {layer} and {counts[width]} "
                "others, and the same number, but not all, leaves each",
            )
    require_fitting(bool(counts), "plan, channels: no unit of a kept layer loses channels")


def require_reduction(activations: Sequence[int], reduction: str | None) -> None:
    """Raise LyapunovPruneError unless activations that go, and they alone, have one of REDUCTIONS."""
    if (activations and reduction in REDUCTIONS) or (not activations and reduction is None):
        return
    why = f"reduction {reduction} applies to dropped activations, and none are; name them or leave it out"
    if activations:
        said = "without a reduction" if reduction is None else f"by the unknown reduction {reduction!r}"
        why = f"activations cannot be dropped {said}; give one of {', '.join(REDUCTIONS)}"
    raise LyapunovPruneError(why)
