"""Layer removal on disk: the tensors that stay are copied from file to file, so the model is never in memory.

The edit is the one used in memory, of the model on the `meta` device; it decides names, shapes and the config.
A removal that changes numbers cannot be done by copying and is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.outline import Outline
from lyapunov_prune.checkpoints.streamed import streamed
from lyapunov_prune.checkpoints.tensor_files import Joined, Part, StoredTensor, TensorPiece, write_tensors
from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.export.disk_gate import not_run, verify_files
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.quantised_names import Layers, follow_layers, layers_in
from lyapunov_prune.models.roles import role
from lyapunov_prune.models.structure import Structure
from lyapunov_prune.models.units import Parts, Unit
from lyapunov_prune.models.width import Width, find_width
from lyapunov_prune.models.wrappers import require_levels_stay
from lyapunov_prune.pruning.counting import shares_leaving
from lyapunov_prune.pruning.edit import Edit, edit_of, filled
from lyapunov_prune.pruning.gate import GateReport
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance, describe
from lyapunov_prune.pruning.removed import ChannelsGone
from lyapunov_prune.results.files import require_disk, require_empty, whole_folder
from lyapunov_prune.results.history import add_step

SHARD_BYTES = 5 * 10**9
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def too_large(name: str, device: str = "cpu") -> str | None:
    """The reason why `write_pruned` has no room for the checkpoint `name` on `device`; None if it has.

    At its peak, removal in memory holds the original on `device` and the reloaded result of the gate on the CPU.
    """
    if name.endswith(".gguf"):
        return None  # no safetensors to copy from
    files = checkpoint_folder(name).glob("*.safetensors")
    size = sum(file.stat().st_size for file in files if file.is_file())  # a link may lead nowhere
    apart = device.startswith("cuda")
    for place, copies in Counter([device if apart else "cpu", "cpu"]).items():
        needed, free = copies * size, free_memory(place)
        if needed > free:
            what = "one copy needs" if copies == 1 else "two copies need"
            return f"{what} {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free" + f" on {place}" * apart
    return None


def prune_on_disk(
    outline: Outline, plan: PruningPlan, target: str | Path, *, stream: bool = False, shard_bytes: int = SHARD_BYTES
) -> Provenance:
    """Remove the layers, experts and channels of `plan` from the checkpoint of `outline` into the folder `target`.

    What is written is what `write_pruned` writes; matrices that lose channels are not refitted. Memory: the headers and
    one buffer, for the gate one layer's experts, and for channels one layer. The gate checks on the written files what
    needs no weights: they hold exactly the keys and shapes that plain transformers asks for, every layer has its
    settings and its place, and exactly what was removed is missing. With `stream` it compares logits too, with one
    layer of each model in memory (`verify_files`). The provenance names the checks that were not run. Raises
    LyapunovPruneError for a plan made for another model, a target that is not empty, a disk that is full or fails,
    files that can no longer be read, a removal that changes numbers and, with `stream`, states that are not finite.
    Raises CheckFailed if a check fails. In every case nothing is left at `target`.
    """
    require_empty(target)
    plan.require_model(outline.identity)
    require_whole(outline.model)
    require_levels_stay(outline.model, plan.remove)
    if plan.gone.experts_gone:
        outline.decoder.mixtures.require(plan.gone.experts_gone, plan.remove)
    plan.require_plain()
    width = find_width(streamed(outline)) if isinstance(plan.gone, ChannelsGone) else None
    edit = cut_outline(outline.decoder, plan, width)
    layers = layers_in(outline.decoder, outline.targets, outline.stored, plan.kept)
    pieces = _pieces(outline, edit, layers, plan)
    gate = partial(verify_files, outline, edit, plan, stream=stream)
    unmade = not_run(outline.model, stream=stream)
    return write_copy(target, outline.decoder, edit, plan, layers, pieces, unmade, gate, shard_bytes)


def write_copy(
    target: str | Path,
    original: Decoder,
    edit: Edit,
    plan: PruningPlan,
    layers: Layers,
    pieces: Mapping[str, Part],
    unmade: tuple[str, ...],
    gate: Callable[[Path], GateReport],
    shard_bytes: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    remedy: str = "prune it in memory",
) -> Provenance:
    """Write what `edit`, made for `plan`, leaves of the files of `original` to the folder `target`, if `gate` passes.

    `pieces` are its tensors, by their new names, `layers` those that stay, by their names in the files, `unmade` the
    checks that the gate does not make. The quantisation `settings` lie in files of their own. Raises LyapunovPruneError
    for a full disk, files that can no longer be read, and a setting whose layers cannot be renumbered. Raises
    CheckFailed if a check fails. In every case nothing is left at `target`.
    """
    pruned = edit.made.model
    follow_layers(pruned.config, layers)
    beside = {name: layers.follow(told) for name, told in settings.items()}
    add_step(pruned, "prune", plan.measured_on, original.model)
    require_disk(target, sum(piece.size for piece in pieces.values()), "the files of the pruned model")
    with whole_folder(target) as folder:
        for name, told in beside.items():
            (folder / name).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        save_files(pruned, original.tokenizer, folder, {})
        write_tensors(folder, pieces, shard_bytes)
        report = gate(folder)
        report.require_passed("the copy", remedy)
        return describe(folder, plan, report, original.structure, pruned, unmade)


def cut_outline(decoder: Decoder, plan: PruningPlan, width: Width | None = None) -> Edit:
    """The edit that leaves `decoder`, on the `meta` device, without what `plan` removes, filled there.

    `width` is that of the model, if channels are removed.
    """
    what = f"{decoder.structure.model_type} computes with weights when layers are removed"
    with reported(what, "prune it in memory", Exception):  # meta tensors have no numbers, which some families read
        edit = edit_of(decoder, plan, width)
        filled(edit, decoder, shared=True).model.eval()
        return edit


def _pieces(outline: Outline, edit: Edit, layers: Layers, plan: PruningPlan) -> dict[str, Part]:
    """The pieces to write, by their names in the pruned checkpoint.

    Raises LyapunovPruneError if copying them would give another result than the removal in memory.
    """
    structure, left = outline.decoder.structure, edit.parts
    before, after = (model.state_dict(keep_vars=True) for model in (outline.model, edit.made.model))
    shares, names = shares_leaving(outline.decoder, edit), new_names(structure, edit, before)
    narrower: dict[tuple[int | None, int | None], tuple[Unit, torch.Tensor]] = {
        (unit.layer, unit.out.expert): (unit, kept) for unit, kept in edit.channels
    }
    pieces: dict[str, Part] = {}
    faults: list[str] = []
    for key, target in outline.targets.items():
        new, called = names[target.name], layers.renamed(key)
        if new is None or called is None:
            if not shares[target.name]:
                faults.append(f"{key} is shared with kept layers")
            continue
        stored = outline.stored[key]
        piece: Part = TensorPiece(stored)
        own = _OF_EXPERT.search(called) if target.name in left else None
        if own is not None:  # a tensor of one expert alone, which transformers stacks on loading
            layer, expert = structure.layer_of(target.name), int(own[1])
            gone = plan.gone.experts_gone.get(layer, ()) if layer is not None else ()
            if expert not in gone:
                number = expert - sum(each < expert for each in gone)
                called = f"{called[: own.start(1)]}{number}{called[own.end(1) :]}"
                which = narrower.get((layer, expert), narrower.get((layer, 0)))  # as `models.units.selected`
                pieces[called] = _of_expert(stored, which, faults)
            continue
        if target.name in left:
            piece = part_of(stored, left[target.name])
        whole = piece == TensorPiece(stored)
        if not (after[new].shape == before[target.name].shape if whole else target.converter is None):
            faults.append(f"the numbers of {new} change")
        pieces[called] = piece
    require_copied(structure, faults)
    return pieces


def part_of(stored: StoredTensor, parts: Parts) -> Part:
    """The part of a tensor that has the same form in the files as in the model."""
    first, index = next(iter(parts.values()))
    if first.position is None:
        total, places = stored.shape[first.axis], index.numpy()
        edges = np.flatnonzero(np.diff(places) != 1) + 1
        size = int(np.gcd.reduce([total, *places[[0, *edges]], *(places[[*(edges - 1), -1]] + 1)]))
        return TensorPiece(stored, first.axis, total // size, tuple((places[::size] // size).tolist()))
    flat = first.flat(len(stored.shape))
    count, *shape = (first.stack, stored.shape[0] // first.stack, *stored.shape[1:]) if flat else stored.shape
    size = stored.size // count
    matrices = [replace(stored, start=stored.start + i * size, size=size, shape=tuple(shape)) for i in range(count)]
    chosen = [parts.get(i, parts[0]) for i in range(count)]  # as `models.units.selected`
    pieces = (
        TensorPiece(matrix, entry.axis, shape[entry.axis], tuple(index.tolist()))
        for matrix, (entry, index) in zip(matrices, chosen, strict=True)
    )
    return Joined(tuple(pieces), stacked=not flat)


def _of_expert(stored: StoredTensor, narrower: tuple[Unit, torch.Tensor] | None, faults: list[str]) -> TensorPiece:
    """The part of a matrix or bias of one expert that belongs to the channels that stay; `faults` gets a reason."""
    if narrower is None:
        return TensorPiece(stored)
    unit, kept = narrower
    axis = {"mlp-in": 0, "mlp-out": 1}.get(role(stored.key.rpartition(".")[0]), -1)
    if not 0 <= axis < len(stored.shape) or stored.shape[axis] != unit.width:
        faults.append(f"{stored.key} holds the channels in a form that is not known")
        return TensorPiece(stored)
    return TensorPiece(stored, axis, unit.width, tuple(kept.tolist()))


def new_names(structure: Structure, edit: Edit, before: Iterable[str]) -> dict[str, str | None]:
    """The name of each tensor of `before` once `edit` is carried out; None for a tensor that is removed.

    Raises LyapunovPruneError unless names change by the number of the layer alone, as those in files are made to, and
    for a family whose weights change with it.
    """
    if len(edit.kept) < structure.num_layers and structure.family.changes(structure.config):
        require_copied(structure, ["the numbers of weights change with that of their layer"])
    after = {old: new for new, old in edit.tensors.items()}
    names = {name: structure.renamed(name, edit.kept) for name in before}
    strange = [new or name for name, new in names.items() if new != after.get(name)]
    require_copied(structure, [f"{name} is numbered in another way" for name in sorted(strange)])
    return names


def require_copied(structure: Structure, faults: Sequence[str]) -> None:
    """Raise LyapunovPruneError, with the first of these reasons, if a copy of bytes would not be the pruned model."""
    if faults:
        raise LyapunovPruneError(
            f"copying cannot remove these layers of {structure.model_type}: {faults[0]}; prune it in memory"
        )
