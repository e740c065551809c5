"""What stays of the tensors of which a plan removes a part: experts, or hidden channels."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.mixtures import Stacked
from lyapunov_prune.models.units import Entry, Parts, Unit, tensors_of
from lyapunov_prune.models.width import Width
from lyapunov_prune.pruning.plan import PruningPlan


def parts_left(decoder: Decoder, plan: PruningPlan, width: Width | None) -> dict[str, Parts]:
    """The indices that stay of each tensor of `decoder`, on the meta device or not, that loses some by `plan`.

    `width` is that of the model (`models.width.find_width`), if channels are removed.
    """
    state, found = decoder.model.state_dict(), dict[str, Parts]()
    for name, (stacked, gone) in stacked_in(decoder, plan).items():
        kept = [e for e in range(stacked.entries) if e not in gone]
        path, _, key = name.rpartition(".")
        entry = Entry(path, key, None, 0, stacked.axis)
        found[name] = {None: (entry, stacked.rows(state[name], kept))}
    narrower = tensors_of(channels_left(plan, width))
    return found | {f"{path}.{key}": parts for (path, key), parts in narrower.items()}


def shares_left_out(decoder: Decoder, plan: PruningPlan) -> dict[str, Fraction]:
    """The share of each such tensor that leaves."""
    found = {name: Fraction(len(gone), stacked.entries) for name, (stacked, gone) in stacked_in(decoder, plan).items()}
    for units, here in zip(decoder.units, plan.channels, strict=True) if plan.channels else ():
        for unit, gone in zip(units, here, strict=False):  # none are given for a removed layer
            if gone:
                share = Fraction(len(gone), unit.width)
                found |= {f"{e.module}.{e.key}": share for e, _ in unit.indices(torch.tensor(gone))}
    return found


def stacked_in(decoder: Decoder, plan: PruningPlan) -> dict[str, tuple[Stacked, Sequence[int]]]:
    """The tensors stacked by expert in the layers that lose experts, and the experts that leave, by name."""
    return {
        f"{decoder.structure.layers_path}.{layer}.{stacked.name}": (stacked, experts)
        for layer, experts in plan.experts_gone.items()
        for stacked in decoder.mixtures.layers[layer].stacked
    }


def channels_left(plan: PruningPlan, width: Width | None) -> list[tuple[Unit, torch.Tensor]]:
    """Each unit that loses channels by `plan`, with those that stay."""
    if width is None:
        return []
    return [
        (unit, channels)
        for layer, here in zip(plan.kept, plan.kept_channels, strict=True)
        for unit, channels in zip(width.units[layer], here, strict=True)
        if unit is not None and channels is not None
    ]
