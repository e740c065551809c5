"""What follows from the lists of a plan: what stays of the model, and which parts go."""

from __future__ import annotations

import numpy as np
import torch

from lyapunov_prune.models.units import Kept
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
