"""Count what a plan removes, and what it leaves of single tensors, by one rule for models in memory and on disk.

The rule needs only names and shapes, which meta tensors have too. The bytes of a name come from the model, or from the
headers of its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.digest import saved_tensors
from lyapunov_prune.models.left_out import LeftOut, left_out
from lyapunov_prune.pruning.edit import Edit

COUNTED = "fell by what was removed"
Sizes = Sequence[tuple[str, int]]  # names of a model's tensors, and the bytes of each in its checkpoint


def shares_leaving(decoder: Decoder, edit: Edit) -> dict[str, Fraction]:
    """The share of each tensor that leaves with `edit`, for every name in the state dict of the model."""
    before, after = (model.state_dict(keep_vars=True) for model in (decoder.model, edit.made.model))
    stays = {place(before[old]): Fraction(after[new].numel(), before[old].numel()) for new, old in edit.tensors.items()}
    return {name: 1 - stays.get(where, Fraction(0)) for name, where in _places(decoder.model).items()}


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
    """What leaves a model: the share of every tensor (`shares_leaving`), and `after`, the new names of the others.

    `before` are the numbers of parameters and of bytes in a checkpoint of the whole model, `gone` those that leave.
    `files` says what of the model's own files it holds.
    """

    layers: int
    shares: Mapping[str, Fraction]
    after: Mapping[str, str | None]
    before: tuple[int, int]
    gone: tuple[int, int]
    files: LeftOut | None


def leaving(decoder: Decoder, edit: Edit, sizes: Sizes | None = None) -> Leaving:
    """What leaves a model whose tensors have these `sizes` in its files; None takes those in memory."""
    shares, model, places = shares_leaving(decoder, edit), decoder.model, _places(decoder.model)
    sizes = sizes_in_memory(model) if sizes is None else sizes
    before = model.num_parameters(), sum(size for _, size in sizes)
    taken = {places[old]: new for new, old in edit.tensors.items()}
    after = {name: taken.get(where) for name, where in places.items()}
    return Leaving(len(edit.kept), shares, after, before, held_by(model, sizes, shares), left_out(model))


def count_check(goes: Leaving, pruned: Decoder, saved: int) -> GateCheck:
    """Whether the counts of layers, parameters and bytes fell by exactly what `goes`.

    `saved` is the number of bytes of all tensors in the pruned checkpoint. If the original was read from files, each
    of their tensors has to be kept, removed by the plan, or left out by name.
    """
    check = fallen_check(goes.before, goes.gone, goes.layers, pruned, saved)
    files, shares = goes.files, goes.shares
    if files is None or not check.passed or not shares.keys() >= set(files.taken.values()):  # or other files
        return check
    held = pruned.model.state_dict().keys()
    removed = sum(shares[name] == 1 for name in files.taken.values())
    for key, name in files.taken.items():
        if shares[name] != 1 and goes.after[name] not in held:
            return GateCheck(COUNTED, False, 0.0, 1.0, f"{key} of the input is neither kept nor removed")
    counts = f"{len(files.taken) - removed} kept, {removed} removed, {len(files.names)} left out by name"
    detail = f"{check.detail}; of {len(files.taken) + len(files.names)} tensors in the files {counts}"
    return replace(check, detail=detail)


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
