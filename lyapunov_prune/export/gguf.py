"""GGUF to GGUF: unchanged tensors are copied byte for byte from the file that the model was read from.

Only tensors that mending or healing changed are written anew, each in its own quantisation. The header is adapted to
the remaining layers (`models.gguf_layers`) and says where the file came from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from lyapunov_prune.checkpoints.reloading import RELOADED
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.export.disk_gate import KEYS, PLACED
from lyapunov_prune.export.gguf_gate import file_reloads, keys_check, places_check
from lyapunov_prune.export.gguf_original import Original, original_of, require_file, require_gguf
from lyapunov_prune.export.llama_cpp import ENGINE, engine_checks
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf import DESCRIPTION_KEY, HISTORY_KEY, PROVENANCE_KEY, stored_history
from lyapunov_prune.models.gguf_copy import Anew, pieces_of, rewrite_text, write_pieces
from lyapunov_prune.models.gguf_header import read_header, text
from lyapunov_prune.models.gguf_layers import values_without
from lyapunov_prune.models.gguf_tensors import rounded
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
from lyapunov_prune.results.files import flushing, require_disk, whole_file
from lyapunov_prune.results.history import History, Step, history_of
from lyapunov_prune.results.result import Result, versions
from lyapunov_prune.results.worth import Worth

_ROOM = 8192  # bytes reserved for the results of the file's checks


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
            KEYS: lambda file: keys_check(read(file), values),
            PLACED: lambda file: places_check(original, read(file), anew),
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
