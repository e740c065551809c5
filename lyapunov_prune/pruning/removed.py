"""The lists of a plan: what they have to fulfil, what stays of the model, and which parts go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.models.units import Kept
from lyapunov_prune.results.arrays import require_array, require_fitting
from lyapunov_prune.results.result import ModelIdentity


class Removed:
    """The part of `pruning.plan.PruningPlan` that is computed from its lists."""

    model: ModelIdentity
    remove: tuple[int, ...]
    drop_attention: tuple[int, ...]
    drop_mlp: tuple[int, ...]
    drop_activation: tuple[int, ...]
    channels: tuple[tuple[tuple[int, ...], ...], ...]
    widths: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The original index of every layer of the pruned model, in order."""
        return tuple(i for i in range(self.model.num_layers) if i not in self.remove)

    @property
    def touched(self) -> tuple[int, ...]:
        """Every layer that is removed, or loses a part."""
        if self.channels:
            return tuple(range(self.model.num_layers))
        lists = {*self.remove, *self.drop_attention, *self.drop_mlp, *self.drop_activation}
        return tuple(sorted(lists | self.experts_gone.keys()))

    @property
    def experts_gone(self) -> dict[int, tuple[int, ...]]:
        """The experts to remove, by their layer."""
        return {layer: gone for layer, gone in enumerate(self.experts) if gone}

    @property
    def drops_sublayers(self) -> bool:
        """Whether a layer that stays loses its attention, its MLP or its activation."""
        return bool(self.drop_attention or self.drop_mlp or self.drop_activation)

    @property
    def drops_parts(self) -> bool:
        """Whether a layer that stays loses its attention, its MLP, its activation, channels or experts."""
        return bool(self.drops_sublayers or self.channels or self.experts_gone)

    @property
    def kept_channels(self) -> Kept:
        """The hidden channels that stay in each unit of the layers `kept`, ascending; None where all do."""
        return tuple(
            tuple(
                torch.from_numpy(np.setdiff1d(np.arange(width), gone)) if gone else None
                for width, gone in zip(self.widths[layer], self.channels[layer], strict=True)
            )
            for layer in (self.kept if self.channels else ())
        )

    @property
    def width(self) -> int:
        """The number of hidden channels of a unit that loses some, in the first such layer an expert's; 0 for none."""
        return self._first[0] if self.channels else 0

    @property
    def channels_gone(self) -> int:
        """How many hidden channels leave each unit of `width`."""
        return self._first[1] if self.channels else 0

    @property
    def _first(self) -> tuple[int, int]:
        pairs = (pair for layer in self.kept for pair in zip(self.widths[layer], self.channels[layer], strict=True))
        return next((width, len(gone)) for width, gone in pairs if gone)

    @property
    def narrowed(self) -> str:
        """What loses channels, in words."""
        experts = any(sum(map(bool, here)) > 1 for here in self.channels)
        return "expert" if experts else "feed-forward block"

    @property
    def remedy(self) -> str:
        """What to do where this plan cannot be carried out."""
        if self.channels:
            return "keep the width, and remove whole layers alone"
        if self.experts_gone:
            return "keep all experts, and remove whole layers alone"
        return "keep those parts, and remove whole layers alone" if self.drops_sublayers else "remove other layers"


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
