"""GGUF to GGUF: unchanged tensors are copied byte for byte from the file that the model was read from.

Only tensors that mending or healing changed are written anew, each in its own quantisation. The header is adapted to
the remaining layers (`models.gguf_layers`) and says where the file came from.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path

import torch

from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck, changed_setting
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.disk_gate import KEYS, PLACED
from lyapunov_prune.export.llama_cpp import ENGINE, engine_checks
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import SAME_LIMIT, sample_inputs
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.cache import BUILTIN, CacheEntry, builtin_place
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf import (
    DESCRIPTION_KEY,
    HISTORY_KEY,
    PROVENANCE_KEY,
    read_gguf,
    source_file,
    stored_history,
)
from lyapunov_prune.models.gguf_copy import Anew, Piece, pieces_of, rewrite_text, same_bytes, write_pieces
from lyapunov_prune.models.gguf_header import Header, Value, read_header, text
from lyapunov_prune.models.gguf_layers import full_attention, values_without
from lyapunov_prune.models.gguf_tensors import rounded
from lyapunov_prune.models.kinds import LayerKinds
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import warn
from lyapunov_prune.pruning.alone import RoundedAlone
from lyapunov_prune.pruning.counting import shares_leaving
from lyapunov_prune.pruning.edit import edit_of
from lyapunov_prune.pruning.gate import CACHED, SKIPPED, GateReport, OnFiles, attempt
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.pruning.removal import removal_gate
from lyapunov_prune.pruning.surgery import Operation
from lyapunov_prune.results.files import flushing, require_disk, require_empty, whole_file
from lyapunov_prune.results.history import History, Step, history_of
from lyapunov_prune.results.result import ModelIdentity, Result, versions
from lyapunov_prune.results.worth import Worth

SUFFIX = ".gguf"
_ROOM = 8192  # bytes reserved for the results of the file's checks


def require_gguf(name: str, plan: PruningPlan) -> Header:
    """The header of the file that the model `name` was read from.

    Raises LyapunovPruneError for a model of another kind of file, and a plan that llama.cpp's header cannot express.
    """
    header = read_header(source_file(name))
    if plan.drops_parts or header.layers != plan.model.num_layers:
        raise LyapunovPruneError(
            f"the GGUF file of {name} has {header.layers} layers and can lose whole ones only; this plan is for "
            f"{plan.model.num_layers}{' and drops parts of them' * plan.drops_parts}; give --layers, or export a folder"
        )
    values_without(header, plan.kept)
    return header


def require_file(target: str | Path) -> None:
    """Raise LyapunovPruneError unless a GGUF file can be written to `target`."""
    if not str(target).endswith(SUFFIX):
        raise LyapunovPruneError(f"{target} is not the name of a GGUF file; end --output in {SUFFIX}")
    require_empty(target, folder=False)


def gguf_identity(name: str, *, planned: bool) -> ModelIdentity:
    """Which model the GGUF file of `name` holds, from its header; for a plan by its weights.

    The weights are known if the file was dequantised before, as ranking does; raises LyapunovPruneError if it was not.
    """
    source = source_file(name)
    if planned:
        folder = builtin_place() if name == BUILTIN else CacheEntry(source).folder
        if not (folder / "config.json").is_file():
            raise LyapunovPruneError(
                f"a plan names its model by dequantised weights, and those of {name} are not in the cache; give "
                "--layers, or leave out --device disk"
            )
        return read_outline(folder, name).identity
    header = read_header(source)
    shapes = sorted((tensor.name, tensor.dims) for tensor in header.tensors)
    return ModelIdentity(
        name=name,
        model_type=header.architecture,
        num_layers=header.layers,
        parameters=sum(prod(dims) for _, dims in shapes),
        architecture=hashlib.sha256(repr(shapes).encode()).hexdigest(),
        weights={},
    )


def gguf_period(name: str) -> int:
    """After how many layers windows repeat in the GGUF file of `name`; 1 if layers are alike or nothing repeats."""
    full = full_attention(read_header(source_file(name))) or (True,)
    return LayerKinds(tuple(map(int, full))).period or 1


def prune_gguf(name: str, plan: PruningPlan, target: str | Path) -> Provenance:
    """Remove the layers of `plan` from the GGUF file of the model `name` into the file `target`, with no model loaded.

    Raises as `save_gguf`. The provenance names the checks of logits, which are not made.
    """
    require_file(target)
    original = Original(require_gguf(name, plan), plan.kept, {})
    history = History((*stored_history(original.header).steps, Step("prune", name, plan.measured_on)))
    provenance = _provenance(plan, GateReport(()), (SKIPPED, CACHED, RELOADED, ENGINE), None)
    written = _written(target, original, {}, history, provenance, {})
    assert written is not None
    return written


@dataclass(frozen=True, eq=False)
class Original:
    """The GGUF file from which another is made, with only the layers `kept`.

    `before` holds the tensors of its model under the names that they have without the other layers.
    """

    header: Header
    kept: tuple[int, ...]
    before: Mapping[str, torch.Tensor]


def original_of(decoder: Decoder, plan: PruningPlan | None = None) -> Original:
    """The file that `decoder` was read from, without the layers of `plan`.

    Raises LyapunovPruneError for a model of another kind of file, and a plan that llama.cpp's header cannot express.
    """
    name, before = decoder.model.config._name_or_path, decoder.model.state_dict()
    if plan is None:
        header = read_header(source_file(name))
        return Original(header, tuple(range(header.layers)), before)
    header, stays = require_gguf(name, plan), {own: decoder.structure.renamed(own, plan.kept) for own in before}
    return Original(header, plan.kept, {new: before[own] for own, new in stays.items() if new is not None})


@in_eval_mode
def save_gguf(
    target: str | Path,
    decoder: Decoder,
    pruned: Decoder,
    operation: Operation,
    batch: TokenBatch | None,
    mended: MendReport | None,
    alone: RoundedAlone | None = None,
) -> Provenance:
    """Write `pruned`, made from `decoder` by `operation`, to `target`: the original file without the removed layers.

    Tensors that differ from those of `decoder` are rounded as the file rounds them, in `pruned` too. Raises CheckFailed
    if the removal or the file fails the gate, and LyapunovPruneError if the target exists or writing fails. In both
    cases nothing is left there.
    """
    plan = operation.plan
    original = original_of(decoder, plan)
    gate, in_memory = removal_gate(decoder, pruned, operation, batch, shares_leaving(decoder, edit_of(decoder, plan)))
    report = gate.report(in_memory, {}, target)
    report.require_passed(remedy=plan.gone.remedy)
    draft = replace(_provenance(plan, report, (), mended), alone=alone)
    made = save_changed(target, original, pruned, draft)
    assert made is not None
    return made


@in_eval_mode
def save_changed(
    target: str | Path, original: Original, made: Decoder, draft: Provenance | None, worth: Worth | None = None
) -> Provenance | None:
    """Write `made` to the file `target`: the bytes of `original`, except for tensors that have changed.

    Changed tensors are rounded as the file rounds them, in `made` too. `draft` says where the model came from, None if
    that is not known; `worth` becomes the file's description. Returns the provenance in the file, with the checks of
    the file. Raises as `save_gguf`.
    """
    require_file(target)
    anew = _anew(original, made)
    checks: dict[str, OnFiles] = {RELOADED: partial(file_reloads, made), **engine_checks(made, made.tokenizer)}
    if draft is not None:
        draft = replace(draft, not_run=() if ENGINE in checks else (ENGINE,), format="gguf")
    return _written(target, original, anew, history_of(made.model), draft, checks, worth)


def _provenance(plan: PruningPlan, gate: GateReport, not_run: tuple[str, ...], mended: MendReport | None) -> Provenance:
    return Provenance(plan.model.name, plan.kept, plan, gate, versions(), not_run, "gguf", mended)


def _written(
    target: str | Path,
    original: Original,
    anew: Mapping[str, Anew],
    history: History,
    draft: Provenance | None,
    checks: Mapping[str, OnFiles],
    worth: Worth | None = None,
) -> Provenance | None:
    """Write `target`, put the file through its own checks and the given ones, and record their results in it."""
    header, kept = original.header, original.kept
    values = values_without(header, kept) | {HISTORY_KEY: text(as_json(history))}
    values |= {} if worth is None else {DESCRIPTION_KEY: text(worth.told())}
    values.pop(PROVENANCE_KEY, None)
    if draft is not None:  # filled in after the checks
        values[PROVENANCE_KEY] = text(" " * (len(as_json(draft)) + _ROOM))
    pieces = pieces_of(header, kept, anew)
    require_disk(Path(target).parent, sum(piece.size for piece in pieces), "the tensors of the pruned model")
    with whole_file(target) as file:
        places = write_pieces(file, values, pieces, header.alignment)
        read = cache(read_header)
        every: dict[str, OnFiles] = {
            KEYS: lambda file: _keys_check(read(file), values),
            PLACED: lambda file: _places_check(original, read(file), anew),
            **checks,
        }
        with flushing(file):
            found = [attempt(name, partial(check, file)) for name, check in every.items()]
        GateReport(tuple(found)).require_passed()
        if draft is None:
            return None
        before = [check for check in draft.gate.checks if check.name not in {each.name for each in found}]
        made = replace(draft, gate=replace(draft.gate, checks=(*before, *found)))
        rewrite_text(file, places[PROVENANCE_KEY], values[PROVENANCE_KEY], as_json(made))
    return made


def as_json(result: Result) -> str:
    return json.dumps(result.to_json(), separators=(",", ":"), allow_nan=False)


def _anew(original: Original, made: Decoder) -> dict[str, Anew]:
    """The tensors in which `made` differs from `original`, as the file will store them. Rounds them in `made` too."""
    after, header = made.model.state_dict(), original.header
    changed = {
        name: after[name]
        for name, tensor in original.before.items()
        if after[name].data_ptr() != tensor.data_ptr() and not torch.equal(after[name], tensor)
    }
    if not changed:
        return {}
    before = {piece.name: piece.source for piece in pieces_of(header, original.kept, {})}
    stored = rounded(made.model, changed, before)
    for own, each in zip(changed, stored, strict=True):
        changed[own].copy_(each.back)
    kinds = Counter(each.quantisation for each in stored)
    other = sum(each.quantisation != before[each.name].quantisation for each in stored)
    told = ", ".join(f"{count} as {kind}" for kind, count in kinds.items())
    if other:
        told += f"; the rows of {other} of them are no whole blocks of the type that they had"
    warn(f"{len(stored)} tensors changed and are written again: {told}; the others are copied byte for byte")
    return {each.name: each.anew for each in stored}


def file_reloads(made: Decoder, file: Path, within: float = 1e-12) -> GateCheck:
    """Whether `file`, read like any GGUF file, is the model `made`; float settings may differ by up to `within`."""
    model = made.model
    again = read_gguf(file, {"dtype": model.dtype, "device_map": str(model.device)})
    limit, wrong = SAME_LIMIT[model.dtype], changed_setting(made.layers, again.layers, within)
    if wrong:
        return GateCheck(RELOADED, False, float("inf"), limit, wrong)
    inputs = sample_inputs(again, None)  # the context in the file may be shorter
    worst = KeptLogits(again, inputs).deviation(KeptLogits(made, inputs))
    return GateCheck(RELOADED, worst <= limit, worst, limit, "logits of what is read from the file")


def _keys_check(written: Header, values: Mapping[str, Value]) -> GateCheck:
    wrong = [key for key in values.keys() | written.values.keys() if written.values.get(key) != values.get(key)]
    detail = f"{min(wrong)} is not what was written" if wrong else f"{len(values)} keys, {written.layers} layers"
    return GateCheck(KEYS, not wrong, len(wrong), 0.0, detail)


def _places_check(original: Original, written: Header, anew: Mapping[str, Anew]) -> GateCheck:
    """Whether every written tensor holds the bytes of its layer in the original, and none is missing."""
    was, kept = {tensor.name: tensor for tensor in original.header.tensors}, original.kept
    stay = {name for name, tensor in was.items() if tensor.layer is None or tensor.layer in kept}
    wrong, found = [], set()
    for tensor in written.tensors:
        name = tensor.name if tensor.layer is None else tensor.named_in(kept[tensor.layer])
        found.add(name)
        if name not in stay or not same_bytes(Piece(tensor.name, was[name], anew.get(tensor.name)), tensor):
            wrong.append(tensor.name)
    if wrong or found != stay:
        lacks = min(wrong or stay - found)
        return GateCheck(PLACED, False, len(wrong), 0.0, f"{lacks} does not hold the bytes of the original")
    went = 1 - sum(was[name].size for name in stay) / sum(tensor.size for tensor in was.values())
    detail = f"{len(stay) - len(anew)} tensors byte for byte, {len(anew)} written anew; {went:.0%} of all bytes removed"
    return GateCheck(PLACED, True, 0.0, 0.0, detail)
