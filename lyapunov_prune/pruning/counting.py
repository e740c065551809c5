"""Count what a plan removes, and what it leaves of single tensors, by one rule for models in memory and on disk.

The rule needs only names and shapes, which meta tensors have too. The bytes of a name come from the model, or from the
headers of its files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.digest import saved_tensors
from lyapunov_prune.models.left_out import LeftOut, left_out
from lyapunov_prune.models.mixtures import Stacked
from lyapunov_prune.models.units import Parts, Unit, WeightEntry, tensors_of
from lyapunov_prune.models.width import Width
from lyapunov_prune.pruning.plan import PruningPlan

COUNTED = "fell by what was removed"
Sizes = Sequence[tuple[str, int]]  # names of a model's tensors, and the bytes of each in its checkpoint


def parts_left(decoder: Decoder, plan: PruningPlan, width: Width | None) -> dict[str, Parts]:
    """The indices that stay of each tensor of `decoder`, on the meta device or not, that loses some by `plan`.

    `width` is that of the model (`models.width.find_width`), if channels are removed.
    """
    state, found = decoder.model.state_dict(), dict[str, Parts]()
    for name, (stacked, gone) in _stacked_in(decoder, plan).items():
        kept = [e for e in range(stacked.entries) if e not in gone]
        path, _, key = name.rpartition(".")
        entry = WeightEntry(path, key, None, 0, stacked.axis)
        found[name] = {None: (entry, stacked.rows(state[name], kept))}
    narrower = tensors_of(channels_left(plan, width))
    return found | {f"{path}.{key}": parts for (path, key), parts in narrower.items()}


def _shares_of_parts(decoder: Decoder, plan: PruningPlan) -> dict[str, Fraction]:
    """The share that leaves of each tensor of which a part does."""
    found = {name: Fraction(len(gone), stacked.entries) for name, (stacked, gone) in _stacked_in(decoder, plan).items()}
    for units, here in zip(decoder.units, plan.channels, strict=True) if plan.channels else ():
        for unit, gone in zip(units, here, strict=False):  # none are given for a removed layer
            if gone:
                share = Fraction(len(gone), unit.width)
                found |= {f"{e.module}.{e.key}": share for e, _ in unit.indices(torch.tensor(gone))}
    return found


def _stacked_in(decoder: Decoder, plan: PruningPlan) -> dict[str, tuple[Stacked, Sequence[int]]]:
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


def shares_leaving(decoder: Decoder, plan: PruningPlan) -> dict[str, Fraction]:
    """The share of each tensor that `plan` removes, for every name in the state dict of the model.

    It is one for tensors that only removed layers hold and for those that a family removes with them (`Family.leaves`).
    From a table with one block per layer the blocks of removed layers go (`Family.tables`). From a tensor of a kept
    layer only the share of its removed channels or experts goes.
    """
    structure, family = decoder.structure, decoder.family
    partly = _shares_of_parts(decoder, plan)
    places = _places(decoder.model)
    stays = {place for name, place in places.items() if structure.layer_of(name) not in plan.remove}
    if family.leaves is not None:
        stays -= {place(p) for p in family.leaves(structure.layers, structure.config, plan.remove)}
    tables = tuple(f".{table}.weight" for table, _ in family.tables)
    blocks = Fraction(len(plan.remove), structure.num_layers)
    return {
        name: partly.get(name, blocks if name.endswith(tables) else Fraction(place not in stays))
        for name, place in places.items()
    }


def _places(model: PreTrainedModel) -> dict[str, int]:
    """The `place` of each tensor of the state dict, by name."""
    return {name: place(t) for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def held_by(model: PreTrainedModel, sizes: Sizes, shares: Mapping[str, Fraction]) -> tuple[int, int]:
    """The number of parameters and bytes in these `shares` of all tensors."""
    parameters = sum(p.numel() * shares[name] for name, p in model.named_parameters())
    return int(parameters), int(sum(size * shares[name] for name, size in sizes))


def sizes_in_memory(model: PreTrainedModel) -> Sizes:
    """The tensors that a checkpoint of `model` holds: each of the state dict once, even if names share it.

    Marian saves no table of positions, which it computes.
    """
    left_out = model._keys_to_ignore_on_save or ()
    saved = [(name, tensor) for name, tensor in saved_tensors(model) if name not in left_out]
    return list({place(t): (name, t.nbytes) for name, t in saved}.values())


@dataclass(frozen=True)
class Leaving:
    """What `plan` removes of a model: the share of every tensor (`shares_leaving`).

    `before` are the numbers of parameters and of bytes in a checkpoint of the whole model, `gone` those that leave.
    `after` are the new names of tensors (`Structure.renamed`). `renumbered` tensors may differ from that in numbers:
    those with several names, of which the files hold one, and all of a family that numbers parts by other layers
    (`Family.leaves`). `files` says what of the model's own files it holds.
    """

    plan: PruningPlan
    shares: Mapping[str, Fraction]
    after: Mapping[str, str | None]
    renumbered: frozenset[str]
    before: tuple[int, int]
    gone: tuple[int, int]
    files: LeftOut | None


def leaving(decoder: Decoder, plan: PruningPlan, sizes: Sizes | None = None) -> Leaving:
    """What `plan` removes of a model whose tensors have these `sizes` in its files; None takes those in memory."""
    shares, model = shares_leaving(decoder, plan), decoder.model
    sizes = sizes_in_memory(model) if sizes is None else sizes
    before = model.num_parameters(), sum(size for _, size in sizes)
    after = {name: decoder.structure.renamed(name, plan.kept) for name in shares}
    places = _places(model)
    often = Counter(places.values())
    every = decoder.family.leaves is not None
    renumbered = frozenset(name for name, where in places.items() if every or often[where] > 1)
    return Leaving(plan, shares, after, renumbered, before, held_by(model, sizes, shares), left_out(model))


def count_check(goes: Leaving, pruned: Decoder, saved: int) -> GateCheck:
    """Whether the counts of layers, parameters and bytes fell by exactly what `goes`.

    `saved` is the number of bytes of all tensors in the pruned checkpoint. If the original was read from files, each
    of their tensors has to be kept, removed by the plan, or left out by name.
    """
    check = fallen_check(goes.before, goes.gone, len(goes.plan.kept), pruned, saved)
    files, shares = goes.files, goes.shares
    if files is None or not check.passed or not shares.keys() >= set(files.taken.values()):  # or other files
        return check
    held = pruned.model.state_dict().keys()
    alike = set(map(_numberless, held))
    removed = sum(shares[name] == 1 for name in files.taken.values())
    for key, name in files.taken.items():
        if shares[name] == 1 or goes.after[name] in held:
            continue
        if name not in goes.renumbered or _numberless(name) not in alike:
            return GateCheck(COUNTED, False, 0.0, 1.0, f"{key} of the input is neither kept nor removed")
    counts = f"{len(files.taken) - removed} kept, {removed} removed, {len(files.names)} left out by name"
    detail = f"{check.detail}; of {len(files.taken) + len(files.names)} tensors in the files {counts}"
    return replace(check, detail=detail)


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def fallen_check(before: tuple[int, int], gone: tuple[int, int], layers: int, pruned: Decoder, saved: int) -> GateCheck:
    """`count_check` for given numbers: the parameters and bytes `before`, those `gone`, and the `layers` that stay."""
    (total, size), (parameters, leave), structure = before, gone, pruned.structure
    wanted = {
        "layers": (structure.num_layers, layers),
        "config's layer count": (getattr(structure.config, structure.count), layers),
        "parameters": (pruned.model.num_parameters(), total - parameters),
        "bytes saved": (saved, size - leave),
    }
    for part, (counted, expected) in wanted.items():
        if counted != expected:
            return GateCheck(COUNTED, False, counted, expected, f"{part}: {counted:,}, not {expected:,}")
    return GateCheck(COUNTED, True, parameters / total, parameters / total, "share of parameters and bytes that left")


def place(tensor: torch.Tensor) -> int:
    """An identifier of the tensor's memory, which tied names share; on the meta device, of the tensor itself."""
    return tensor.data_ptr() or id(tensor)
