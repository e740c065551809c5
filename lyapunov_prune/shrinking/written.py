"""The smaller model as a checkpoint, and the commands that would make it by hand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.cards import as_text
from lyapunov_prune.checkpoints.reloading import RELOADED, reload_check
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError, printable
from lyapunov_prune.export.gguf import save_changed
from lyapunov_prune.export.gguf_original import original_of, require_file
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.healing.report import REPORT as HEALING
from lyapunov_prune.healing.report import Healing
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.gguf import SUFFIX, source_file
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.gguf_layers import full_attention, values_without
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.pruning.counting import COUNTED, count_check, leaving
from lyapunov_prune.pruning.edit import edit_of
from lyapunov_prune.pruning.gate import GateReport, attempt, bytes_in
from lyapunov_prune.pruning.provenance import Provenance, describe, save
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.result import Result, versions
from lyapunov_prune.shrinking.choosing import Chosen
from lyapunov_prune.shrinking.report import REPORT, Shrinking
from lyapunov_prune.shrinking.request import Request


def is_gguf(output: Path) -> bool:
    return output.suffix == SUFFIX


def require_output(name: str, output: Path) -> None:
    """Raise LyapunovPruneError unless the shrunk model of `name` can be written to `output`, a folder or a file."""
    if not is_gguf(output):
        require_empty(output)
        return
    require_file(output)
    header = read_header(source_file(name))
    values_without(header, tuple(range(header.layers)))
    if len(set(full_attention(header) or ())) > 1:
        raise LyapunovPruneError(
            "llama.cpp reads the windows of this model as one period, and shrink chooses layers freely; use prune, "
            "which removes whole periods, then heal"
        )


def write_shrunk_gguf(
    request: Request, smaller: PreTrainedModel, choice: Chosen, gate: GateReport, report: Shrinking, target: Path
) -> tuple[int, int]:
    """Write `smaller` to the GGUF file `target`; returns the bytes of the original's file, and of this one.

    Raises as `export.gguf.save_changed`.
    """
    plan = choice.plan
    made = Provenance(
        plan.model.name, plan.kept, plan, gate, versions(), (), "gguf", choice.report, report.commands, report.alone
    )
    original = original_of(wrap(request.model), plan)
    dense_score, score = report.evaluation.perplexities
    save_changed(target, original, wrap(smaller, request.tokenizer), made, score.worth(dense_score))
    return sum(part.stat().st_size for part in original.header.parts), target.stat().st_size


@torch.no_grad()
def write_shrunk(
    request: Request,
    smaller: PreTrainedModel,
    choice: Chosen,
    gate: GateReport,
    report: Shrinking,
    target: Path,
    *,
    healing: Healing | None,
    batch: TokenBatch,
) -> Provenance:
    """Write `smaller` with its card, provenance, report and measurements to `target`, whole or not at all.

    `gate` is the gate of the removal, before healing. This function checks again that the files load as they were saved
    and hold exactly what should be left. Raises CheckFailed if not, and LyapunovPruneError if writing fails.
    """
    results: dict[str, Result] = {REPORT: report, "best.json": choice.found, "eval.json": report.evaluation}
    sections = {"Evaluated": "\n".join(f"- {as_text(line)}." for line in (report.read(), *report.worth()))}
    healed: dict[str, Any] = {"sections": sections}
    if healing is not None:
        results[HEALING] = healing
        since = f"It learnt\nafter the removal, for {healing.steps} steps, to predict what the dense model predicts."
        healed = {"since": since, "sections": {"Healed": healing.about(), **sections}}
    dense, made = wrap(request.model), wrap(smaller)
    inputs = sample_inputs(made, batch)
    with whole_folder(target) as folder:
        save(smaller, request.tokenizer, folder)
        goes = leaving(dense, edit_of(dense, choice.plan))
        checks = {
            RELOADED: attempt(RELOADED, lambda: in_eval_mode(reload_check)(made, folder, inputs)),
            COUNTED: attempt(COUNTED, lambda: count_check(goes, made, bytes_in(folder))),
        }
        gate = replace(gate, checks=tuple(checks.get(check.name, check) for check in gate.checks))
        gate.require_passed()
        for name, result in results.items():
            result.save(folder / name)
        dense_score, score = report.evaluation.perplexities
        healed["worth"] = score.worth(dense_score, report.speed())
        told: dict[str, Any] = {"mended": choice.report, "commands": report.commands, "alone": report.alone, **healed}
        return describe(folder, choice.plan, gate, dense.structure, smaller, **told)


def by_hand(
    request: Request,
    choice: Chosen,
    healed: Sequence[str] | None,
    texts: tuple[TokenBatch, TokenBatch, TokenBatch, TokenBatch | None],
    output: str,
) -> tuple[str, ...]:
    """The commands that make the same model by hand, into `output`.

    `healed` are the options of `heal`, None if healing was not kept. `texts` choose, teach, evaluate, and evaluate on
    another kind.
    """
    plan, target, text, source = choice.plan, request.target, request.text, request.source
    choose, learn, held_out, foreign = texts
    name, cut = plan.model.name, f"{output}-cut"
    chosen = ["--layers", ",".join(map(str, plan.remove)), *([] if choice.report is None else ["--mend"])]
    first = output if healed is None else cut
    commands = [["prune", name, *chosen, *source, *text, *request.judge, *_size(choose), "-o", first]]
    if healed is not None:
        taught = text or ("--text", "self")
        commands.append(["heal", cut, "--teacher", name, *healed, *source, *taught, *_size(learn), "-o", output])
    asked = [] if target.task is None else ["--tasks", target.task]
    commands.append(["eval", output, "--against", name, "--speed", *asked, *source, *text, *_size(held_out)])
    if foreign is not None:
        commands.append(["eval", output, "--against", name, *source, "--text", foreign.text, *_size(foreign)])
    return tuple(printable(shlex.join(["lyapunov-prune", *words])) for words in commands)


def _size(text: TokenBatch) -> list[str]:
    return ["--context", f"{text.context}", "--tokens", f"{text.tokens}"]
