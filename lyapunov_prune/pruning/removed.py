"""What a plan removes, a class a kind: whole layers, and with them channels, experts, or attentions and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.models.units import Kept
from lyapunov_prune.results.arrays import each_once, require_array, require_fitting
from lyapunov_prune.results.result import ModelIdentity


@dataclass(frozen=True)
class LayersGone:
    """The whole layers `remove`, by their numbers in the original. The other kinds also take parts of those that stay.

    `remedy` says what to do where the removal cannot be carried out.
    """

    remove: tuple[int, ...]

    remedy: ClassVar[str] = "remove other layers"

    def fitted(self, model: ModelIdentity) -> Self:
        """The same with ascending layers; raises LyapunovPruneError unless `model` has all that is named, each once."""
        return replace(self, remove=each_once("layers to remove", self.remove, model.num_layers))

    @property
    def touched(self) -> tuple[int, ...]:
        """Every layer that is removed, or loses a part."""
        return self.remove

    @property
    def kept_channels(self) -> Kept:
        """The hidden channels that stay in each unit of the layers that stay, ascending; None where all do."""
        return ()

    @property
    def experts_gone(self) -> Mapping[int, tuple[int, ...]]:
        """The experts to remove, by their layer."""
        return {}

    def columns(self, layers: np.ndarray) -> dict[str, Any]:
        """What the parts of `layers` lose, for a table."""
        return {}

    def told(self, model: ModelIdentity, by: str) -> list[str]:
        """What goes by the criterion `by`, in words."""
        return _listed(self.remove, "", model, by)


def _listed(layers: tuple[int, ...], part: str, model: ModelIdentity, by: str) -> list[str]:
    how = "as named" if by == "given" else f"by {by}"
    of = f"{part}{len(layers)} of {model.num_layers} layers of {model.name} {how}"
    return [f"{of}: {', '.join(map(str, layers))}"] if layers else []


@dataclass(frozen=True)
class ChannelsGone(LayersGone):
    """`channels[l][j]` lists the hidden channels that leave unit j of layer l, of the `widths[l][j]` that it has.

    A unit is a feed-forward block or one expert (`Decoder.units`). The list is empty for a unit that keeps
    all of its channels and in a removed layer. All units of one width that lose some lose the same number, not all.
    """

    channels: tuple[tuple[tuple[int, ...], ...], ...]
    widths: tuple[tuple[int, ...], ...]

    remedy: ClassVar[str] = "keep the width, and remove whole layers alone"

    def fitted(self, model: ModelIdentity) -> Self:
        layers = model.num_layers
        alike = len(self.channels) == layers and [*map(len, self.channels)] == [*map(len, self.widths)]
        require_fitting(alike, f"plan, channels: every unit of the {layers} layers has a list and a width")
        whole = not any(any(here) for layer, here in enumerate(self.channels) if layer in self.remove)
        require_fitting(whole, "plan, channels: a layer that goes whole loses channels too")
        counts: dict[int, int] = {}
        for layer, (here, sizes) in enumerate(zip(self.channels, self.widths, strict=True)):
            for gone, width in zip(here, sizes, strict=True):
                if not gone:
                    continue
                ascending = list(gone) == sorted(set(gone)) and 0 <= gone[0] <= gone[-1] < width
                require_fitting(ascending, f"plan, channels: those of layer {layer} ascend below {width}")
                same = counts.setdefault(width, len(gone)) == len(gone) < width
                require_fitting(
                    same,
                    f"plan, channels: {len(gone)} of {width} channels leave a unit of layer {layer} and "
                    f"{counts[width]} others, and the same number, but not all, leaves each",
                )
        require_fitting(bool(counts), "plan, channels: no unit of a kept layer loses channels")
        return super().fitted(model)

    @property
    def touched(self) -> tuple[int, ...]:
        return tuple(range(len(self.channels)))

    @property
    def kept_channels(self) -> Kept:
        return tuple(
            tuple(
                torch.from_numpy(np.setdiff1d(np.arange(width), gone)) if gone else None
                for width, gone in zip(sizes, here, strict=True)
            )
            for layer, (here, sizes) in enumerate(zip(self.channels, self.widths, strict=True))
            if layer not in self.remove
        )

    def beside(self, remove: tuple[int, ...]) -> ChannelsGone:
        """The channels of the layers that stay where the layers `remove` go too."""
        channels = tuple(() if i in remove else each for i, each in enumerate(self.channels))
        widths = tuple(() if i in remove else each for i, each in enumerate(self.widths))
        return replace(self, remove=remove, channels=channels, widths=widths)

    @property
    def width(self) -> int:
        """The number of hidden channels of a unit that loses some, in the first such layer an expert's."""
        return self._first[0]

    @property
    def fewer(self) -> int:
        """How many hidden channels leave each unit of `width`."""
        return self._first[1]

    @property
    def _first(self) -> tuple[int, int]:
        layers = zip(self.widths, self.channels, strict=True)
        pairs = (pair for sizes, here in layers for pair in zip(sizes, here, strict=True))
        return next((width, len(gone)) for width, gone in pairs if gone)

    @property
    def narrowed(self) -> str:
        """What loses channels, in words."""
        experts = any(sum(map(bool, here)) > 1 for here in self.channels)
        return "expert" if experts else "feed-forward block"

    def columns(self, layers: np.ndarray) -> dict[str, Any]:
        return {"channels_removed": [sum(map(len, here)) for here in self.channels]}

    def told(self, model: ModelIdentity, by: str) -> list[str]:
        units = sum(bool(block) for here in self.channels for block in here)
        return [
            *super().told(model, by),
            f"{self.fewer} of {self.width} hidden channels from each of {units} {self.narrowed}s of {model.name} by "
            f"{by}, of which {self.width - self.fewer} are kept",
        ]


@dataclass(frozen=True)
class ExpertsGone(LayersGone):
    """`experts` lists, ascending, the experts that leave each mixture that stays: the same number, one or more.

    `routed` (L,) is the share of the router's weight that they had on the text, NaN in layers that lose none; None if
    it was not measured.
    """

    experts: dict[int, tuple[int, ...]]
    routed: np.ndarray | None = field(default=None, compare=False)

    remedy: ClassVar[str] = "keep all experts, and remove whole layers alone"

    def fitted(self, model: ModelIdentity) -> Self:
        each_once("layers that lose experts", tuple(self.experts), model.num_layers)
        counts = set(map(len, self.experts.values()))
        bad = (i for i, gone in self.experts.items() if any(a >= b for a, b in pairwise((-1, *gone))))
        twice, wrong = next(iter(self.experts.keys() & {*self.remove}), None), next(bad, None)
        fault = ""
        if not counts or 0 in counts:
            fault = "a layer is named without experts, or none; leave it out"
        elif len(counts) > 1:
            fault = (
                f"{min(counts)} are removed from one layer and {max(counts)} from another, but a config has one number "
                "for all layers; remove the same number from each"
            )
        elif wrong is not None:
            fault = f"{list(self.experts[wrong])} of layer {wrong}; name each once, ascending, counted from 0"
        elif twice is not None:
            fault = f"layer {twice} is removed with its experts; name it once"
        if fault:
            raise LyapunovPruneError(f"plan, experts: {fault}")
        if self.routed is not None:
            require_array("plan, routed", self.routed, (model.num_layers,), most=1 + 1e-9, finite=False)
        return super().fitted(model)

    @property
    def touched(self) -> tuple[int, ...]:
        return tuple(sorted({*self.remove, *self.experts}))

    def beside(self, remove: tuple[int, ...]) -> ExpertsGone:
        """The experts of the layers that stay where the layers `remove` go too."""
        routed = self.routed
        if routed is not None:
            routed = np.where(np.isin(range(len(routed)), remove), np.nan, routed)
        experts = {layer: gone for layer, gone in self.experts.items() if layer not in remove}
        return replace(self, remove=remove, experts=experts, routed=routed)

    @property
    def fewer(self) -> int:
        """How many experts leave each mixture."""
        return len(next(iter(self.experts.values())))

    @property
    def experts_gone(self) -> Mapping[int, tuple[int, ...]]:
        return self.experts

    def columns(self, layers: np.ndarray) -> dict[str, Any]:
        columns: dict[str, Any] = {"experts": [" ".join(map(str, self.experts.get(i, ()))) for i in layers]}
        return columns if self.routed is None else columns | {"routed": self.routed}

    def told(self, model: ModelIdentity, by: str) -> list[str]:
        share = "" if self.routed is None else f", which had {np.nanmean(self.routed):.1%} of the router's weight"
        experts = f"{self.fewer} expert{'s' * (self.fewer > 1)} of each of {len(self.experts)} layers of {model.name}"
        return [*super().told(model, by), f"{experts} by {by}{share}"]


@dataclass(frozen=True)
class PartsGone(LayersGone):
    """The layers that lose their `attention`, and those that lose the `activation` of their feed-forward block.

    Without its activation a block becomes one linear map by `reduction`, a name of `merging.table.REDUCTIONS`; it is
    None if no activation goes. Only a compact model lacks such parts.
    """

    attention: tuple[int, ...]
    activation: tuple[int, ...] = ()
    reduction: str | None = None

    remedy: ClassVar[str] = "keep those parts, and remove whole layers alone"

    def fitted(self, model: ModelIdentity) -> Self:
        attention = each_once("layers that lose their attention", self.attention, model.num_layers)
        activation = each_once("layers that lose their activation", self.activation, model.num_layers)
        if twice := sorted(set(self.remove) & {*self.attention, *self.activation}):
            raise LyapunovPruneError(f"layer {twice[0]} goes whole, and a part of it too; name it once")
        if bool(self.activation) != (self.reduction is not None) or self.reduction not in (None, *REDUCTIONS):
            raise LyapunovPruneError(
                f"activations that go, and they alone, have a reduction, and it is {self.reduction}; give one of "
                f"{', '.join(REDUCTIONS)}, or no activation"
            )
        return replace(super().fitted(model), attention=attention, activation=activation)

    @property
    def touched(self) -> tuple[int, ...]:
        return tuple(sorted({*self.remove, *self.attention, *self.activation}))

    def columns(self, layers: np.ndarray) -> dict[str, Any]:
        return {f"no_{part}": np.isin(layers, getattr(self, part)) for part in ("attention", "activation")}

    def told(self, model: ModelIdentity, by: str) -> list[str]:
        return [
            *super().told(model, by),
            *_listed(self.attention, "the attention of ", model, by),
            *_listed(self.activation, f"the activation (reduction {self.reduction}) of ", model, by),
        ]
