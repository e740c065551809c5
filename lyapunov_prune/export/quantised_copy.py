"""Layer removal from a quantised checkpoint by copying bytes; no kernel or library of its quantisation is needed.

Whatever the method stores instead of a matrix (integers, scales, zero points, tables) is filed under the name of its
layer and moves with it. The config states which layers are left, and names in its quantisation settings are renumbered
(`models.quantised_names`). Nothing is computed, so no logits are compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lyapunov_prune.checkpoints.reloading import GateCheck, changed_setting
from lyapunov_prune.checkpoints.tensor_files import Part, StoredTensor, TensorPiece, parts_of, read_tensors, reading
from lyapunov_prune.errors import LyapunovPruneError, reported
from lyapunov_prune.export.copied import SHARD_BYTES, cut_outline, new_names, part_of, require_copied, write_copy
from lyapunov_prune.export.disk_gate import KEYS, PLACED, not_run
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.left_out import LeftOut, find_left_out, keep_left_out
from lyapunov_prune.models.loading import checkpoint_folder, load_bare_outline
from lyapunov_prune.models.quantised import reader_of, stored_quantisation
from lyapunov_prune.models.quantised_names import FILES, Layers, layers_in, settings_of
from lyapunov_prune.models.structure import identify
from lyapunov_prune.models.weight_files import TensorTarget, require_every_layer, targets_of
from lyapunov_prune.models.wrappers import require_levels_stay
from lyapunov_prune.progress import status, warn
from lyapunov_prune.pruning.counting import shares_leaving
from lyapunov_prune.pruning.edit import Edit
from lyapunov_prune.pruning.gate import GateReport, attempt
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.results.files import require_empty
from lyapunov_prune.results.result import ModelIdentity


@dataclass(frozen=True, eq=False)
class Quantised:
    """A quantised checkpoint on disk. `decoder` is the model of its config on the `meta` device, its matrices plain.

    `stored` are all tensors of the files except the prediction `heads`; `targets` are those that belong to a tensor of
    that model.
    """

    folder: Path
    decoder: Decoder
    stored: dict[str, StoredTensor]
    targets: dict[str, TensorTarget]
    heads: tuple[str, ...]

    @cached_property
    def identity(self) -> ModelIdentity:
        """The identity by its config alone, because no weight is read as a number."""
        return identify(self.decoder.model, {})

    def layers(self, kept: tuple[int, ...]) -> Layers:
        return layers_in(self.decoder, self.targets, (*self.stored, *self.heads), kept)

    def settings(self) -> dict[str, Any]:
        """The quantisation settings of its config and of the files that repeat them, by file."""
        found: dict[str, Any] = {"config.json": [told for *_, told in settings_of(self.decoder.model.config)]}
        for name in FILES:
            if (self.folder / name).is_file():
                with reported(f"{self.folder / name} is not JSON", "fetch it again", ValueError):
                    found[name] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        return found


def quantised(name: str) -> str | None:
    """The reason why layers of the checkpoint `name` are removed by copying; None for plain weights and GGUF files."""
    settings = None if name.endswith(".gguf") else stored_quantisation(checkpoint_folder(name))
    return (
        None if settings is None else f"its weights are quantised ({settings.get('quant_method', 'no method named')})"
    )


def stays_quantised(name: str) -> bool:
    """Whether the checkpoint `name` uses a quantisation that stays in place when it is loaded."""
    settings = stored_quantisation(checkpoint_folder(name))
    return settings is not None and reader_of(SimpleNamespace(quantization_config=settings)) is None


def read_quantised(folder: Path, name: str | Path) -> Quantised:
    """The quantised checkpoint in `folder`: its config and the headers of its files.

    Raises LyapunovPruneError unless it is a whole checkpoint of a decoder, with all of its layers.
    """
    decoder = load_bare_outline(folder, name)
    with reading(()):
        stored = read_tensors(folder, getattr(decoder.model.config, "transformers_weights", None))
    targets, others = targets_of(decoder.model, stored)
    heads = find_left_out(decoder.model, decoder.structure, {}, others).heads
    keep_left_out(decoder.model, LeftOut({}, heads=heads), folder)
    found = Quantised(folder, decoder, {k: t for k, t in stored.items() if k not in heads}, targets, heads)
    total, layers = decoder.structure.num_layers, found.layers(())
    numbers = {layers.number(key) for key in found.stored} - {None}
    require_every_layer(folder, total, numbers)
    return found


def plan_for_quantised(checkpoint: Quantised, plan: PruningPlan) -> PruningPlan:
    """`plan`, as one for this checkpoint.

    Raises LyapunovPruneError for a plan of another family, depth or setting. Weights cannot be compared here: a plan
    made on the model before quantisation is accepted too, with a warning that weights were not compared.
    """
    mine, theirs = checkpoint.identity, plan.model
    other = mine.other_settings(theirs)
    if other or (mine.model_type, mine.num_layers) != (theirs.model_type, theirs.num_layers):
        raise LyapunovPruneError(
            f"this plan was made for {theirs.name} ({theirs.model_type}, {theirs.num_layers} layers), not for "
            f"{mine.name}{other}; give --layers"
        )
    warn(f"the plan is for {theirs.name}; family, depth and settings were checked, weights were not")
    return replace(plan, model=mine)


def prune_quantised(
    checkpoint: Quantised, plan: PruningPlan, target: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> Provenance:
    """Remove the layers of `plan` from `checkpoint` into the folder `target`, byte for byte. Memory: one buffer.

    The gate checks that every written tensor has the bytes of its own layer in the original, that none is missing or
    left over, and that config and quantisation settings describe what is left. Raises LyapunovPruneError for a target
    that is not empty, a full disk, a removal that changes numbers, and a setting whose layer names cannot be
    renumbered. Raises CheckFailed if a check fails. In every case nothing is left at `target`.
    """
    require_empty(target)
    require_levels_stay(checkpoint.decoder.model, plan.remove)
    decoder, layers = checkpoint.decoder, checkpoint.layers(plan.kept)
    require_copied(decoder.structure, ["parts of layers are no whole tensors"] if plan.drops_parts else [])
    edit = cut_outline(decoder, plan)
    pieces = _pieces(checkpoint, edit, layers)
    beside = {name: told for name, told in checkpoint.settings().items() if name in FILES}
    gate, unmade = partial(verify_bytes, checkpoint, edit, plan), not_run(decoder.model, stream=False)
    return write_copy(target, decoder, edit, plan, layers, pieces, unmade, gate, shard_bytes, beside, plan.gone.remedy)


def _pieces(checkpoint: Quantised, edit: Edit, layers: Layers) -> dict[str, Part]:
    """The pieces to write, by their new names; raises LyapunovPruneError if a copy would not be the pruned model."""
    structure, shares = checkpoint.decoder.structure, shares_leaving(checkpoint.decoder, edit)
    tables = set(map(_module, edit.parts))
    names = new_names(structure, edit, checkpoint.decoder.model.state_dict())
    faults = [
        *(
            f"{name} is shared among layers"
            for name, new in names.items()
            if name not in edit.parts and shares[name] != (new is None)
        ),
        *(
            f"{key} is a quantised table with a block for every layer"
            for key in checkpoint.stored
            if _module(key) in tables and not _is_as_in_model(checkpoint, key)
        ),
    ]
    require_copied(structure, faults)
    return {new: _piece(checkpoint, key, edit) for key in checkpoint.stored if (new := layers.renamed(key)) is not None}


def _is_as_in_model(checkpoint: Quantised, key: str) -> bool:
    """Whether the stored tensor `key` is a tensor of the model and has the shape that it has there."""
    target = checkpoint.targets.get(key)
    shape = checkpoint.stored[key].shape
    return target is not None and tuple(checkpoint.decoder.model.get_parameter(target.name).shape) == shape


def _piece(checkpoint: Quantised, key: str, edit: Edit) -> Part:
    """A whole tensor or, for a table with one block per layer, the blocks of the layers that stay."""
    stored, target = checkpoint.stored[key], checkpoint.targets.get(key)
    parts = None if target is None else edit.parts.get(target.name)
    return TensorPiece(stored) if parts is None else part_of(stored, parts)


def _module(name: str) -> str:
    """The module that holds the tensor `name`, by its own name alone."""
    return name.rpartition(".")[0].rpartition(".")[2]


def verify_bytes(checkpoint: Quantised, edit: Edit, plan: PruningPlan, folder: Path) -> GateReport:
    """The checks of `prune_quantised` on what lies in `folder`."""
    try:
        written = read_quantised(folder, plan.model.name)
    except LyapunovPruneError as error:
        reason = str(error).replace(str(folder), "what was written").rpartition(";")[0]
        return GateReport((GateCheck(KEYS, False, float("inf"), 0.0, reason),))
    checks = {
        KEYS: lambda: _settings_check(checkpoint, written, edit.made, plan),
        PLACED: lambda: _bytes_check(checkpoint, written, edit),
    }
    with status("comparing bytes"):
        return GateReport(tuple(attempt(name, check) for name, check in checks.items()))


def _settings_check(checkpoint: Quantised, written: Quantised, pruned: Decoder, plan: PruningPlan) -> GateCheck:
    """Whether every layer kept its settings, and the quantisation settings name the same parts of it as before."""
    wrong = changed_setting(pruned.layers, written.decoder.layers)
    layers = checkpoint.layers(())
    was, now = (layers.by_layer(each.settings()) for each in (checkpoint, written))
    place = {None: None} | {old: new for new, old in enumerate(plan.kept)}
    moved = {place[old]: names for old, names in was.items() if old in place}
    if not wrong and moved != now:
        layer = next(key for key in moved.keys() | now.keys() if moved.get(key) != now.get(key))
        wrong = f"the quantisation settings name other modules of layer {layer} than of the layer that it was"
    detail = "settings of every layer, and the names in the quantisation settings"
    return GateCheck(KEYS, not wrong, float(bool(wrong)), 0.0, wrong or detail)


def _bytes_check(checkpoint: Quantised, written: Quantised, edit: Edit) -> GateCheck:
    """Whether every written tensor holds the bytes that the same tensor of the same layer had in the original."""
    layers, missing = checkpoint.layers(edit.kept), set(checkpoint.stored)
    for key, stored in written.stored.items():
        layer = layers.number(key)
        source = key if layer is None else layers.at(key, edit.kept[layer])
        if source not in missing:
            return GateCheck(PLACED, False, float("inf"), 0.0, f"{key} is no tensor of a kept layer")
        missing.remove(source)
        was = _piece(checkpoint, source, edit)
        if (stored.dtype, stored.shape) != (was.stored.dtype, was.shape) or _digest(was) != _digest(
            TensorPiece(stored)
        ):
            return GateCheck(PLACED, False, 1.0, 0.0, f"{key} does not hold the bytes of {source}")
    left = [key for key in missing if layers.renamed(key) is not None]
    if left:
        return GateCheck(PLACED, False, float("inf"), 0.0, f"{min(left)} of the original is missing")
    size, total = (sum(stored.size for stored in each.stored.values()) for each in (written, checkpoint))
    detail = f"{len(written.stored)} tensors byte for byte, each of the layer that it was; {1 - size / total:.0%} of"
    return GateCheck(PLACED, True, 0.0, 0.0, f"{detail} all bytes went")


def _digest(piece: Part) -> bytes:
    digest = hashlib.blake2b()
    for part in parts_of(piece):
        digest.update(part)
    return digest.digest()
