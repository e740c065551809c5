"""Heal a pruned checkpoint from the model it was cut out of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, format_for
from lyapunov_prune.cli.jobs import first_goes_on, jobs_folder
from lyapunov_prune.cli.options import ABOVE_ZERO, FileTarget, Inputs, TextOptions, model_option, what_option
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.progress import is_main

if TYPE_CHECKING:
    from lyapunov_prune.healing.heal import Healed
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.pruning.provenance import Provenance
    from lyapunov_prune.results.result import Result

_NO_ORIGIN = "no file in {} says which model it was made from; give that as --teacher"


@dataclass(frozen=True)
class TrainingOptions:
    """How long is trained, what, and in how many processes."""

    steps: Annotated[
        int | None, what_option(min=1, help="Maximum number of training steps; default: 100 unless --minutes is given.")
    ] = None
    minutes: Annotated[float | None, ABOVE_ZERO, what_option(help="Maximum minutes of training.")] = None
    rank: Annotated[
        int | None,
        what_option(
            "--update-rank", min=1, help="Train low-rank updates of this rank; default: all weights of the layers."
        ),
    ] = None
    shard: Annotated[
        bool, what_option("--shard", help="Each process of accelerate launch holds only its part of the layers.")
    ] = False


def heal(
    model: Annotated[str, checks.MODEL, typer.Argument(help="Folder or .gguf file of a pruned model.")],
    *,
    training: TrainingOptions = TrainingOptions(),
    teacher: Annotated[
        str | None, checks.MODEL, model_option(help="The dense model; not needed if it is the built-in one.")
    ] = None,
    inputs: Inputs = Inputs(dtype="float32", text="self", tokens=25600, context=256),
    output: FileTarget,
    given: Given = Given(),
) -> None:
    """Train a pruned model to predict what the dense one predicts; writes a plain checkpoint with healing.json.

    If --output ends in .gguf, the GGUF file of MODEL, or that of the dense model without the removed layers, is copied
    with the tensors that healing changed; healing.json goes to runs/MODEL.
    It learns from text that the dense model writes, or from the calibration half of --text. Some windows are
    held back to judge: the weights that are best on them are written. If nothing beats the pruned model, nothing is
    written and the exit code is 1. The result is scored on text that was used for neither, in windows of 512 tokens, as
    by eval, unless --context is given. If the run is interrupted, the same command continues.
    """
    inputs.require_loaded("heal", one_place=True)
    if teacher is None and not (model.endswith(".gguf") or (Path(model) / "provenance.json").is_file()):
        raise LyapunovPruneError(_NO_ORIGIN.format(model))

    from lyapunov_prune.export.table import FORMATS
    from lyapunov_prune.healing.heal import heal as heal_model
    from lyapunov_prune.healing.sharded import sharing
    from lyapunov_prune.healing.trained import require_few, require_trainable
    from lyapunov_prune.models.gguf import source_file
    from lyapunov_prune.models.size import model_size
    from lyapunov_prune.pruning.surgery import share_memory
    from lyapunov_prune.results.claim import Kept
    from lyapunov_prune.results.files import require_disk

    stored = FORMATS.make(format_for(output, "plain", given))
    stored.require_target(output)
    jobs = jobs_folder()
    per_step = int(os.environ.get("WORLD_SIZE", "1"))  # each process of accelerate launch takes a window of a step
    require_few(per_step * (training.steps or 0))
    if training.shard:
        sharing(per_step, training.rank)
    provenance, teacher = _origin(model, teacher)
    own = provenance is None or model.endswith(".gguf")  # the file that the healed one is made of
    if stored.name == "gguf":
        source_file(model if own else teacher)
    loaded, dense = _pair(model, teacher, inputs, provenance)
    require_trainable(loaded.model, "the pruned model", training.rank)
    require_disk(output, model_size(loaded.model).bytes, "the files of the healed model")
    if provenance is not None:
        share_memory(loaded.model, dense, provenance.plan)
    original = _original(loaded, dense, own, provenance) if stored.name == "gguf" else None
    about = {"models": [loaded.identity.key, dense.identity.key], "text": [inputs.text, inputs.tokens, inputs.context]}
    about |= {**vars(training), "per_step": per_step}
    with Kept(jobs if is_main() else None, "healing", about) as job:  # before the dense model writes for minutes
        job.hold()
        batch = inputs.batch(dense, "calibration")
        held_out = _held_out(inputs, loaded, given).batch(dense, "evaluation")
        done = heal_model(
            loaded.model,
            dense.model,
            batch,
            **vars(training),
            per_step=per_step,
            folder=job.place,
            evaluation=held_out,
        )
        first_goes_on()
        kept = None
        if done.report.kept >= 0:
            kept = _write(model, output, loaded, done, original, provenance)
        job.forget()
    if kept is None:
        _refuse(done.report, output)
    show(done.report, output, kept=kept)


def _held_out(inputs: Inputs, loaded: Decoder, given: Given) -> TextOptions:
    """The text to score on, in windows as wide as those of eval: perplexities in shorter windows are higher."""
    return inputs.as_eval(inputs.context if "context" in given else loaded.structure.at_most(Inputs.context))


def _refuse(report: Result, output: Path) -> NoReturn:
    """Show the report of a healing that did not help, and raise CheckFailed."""
    show(report, None)
    raise CheckFailed(
        f"healing did not beat the pruned model on the validation windows; {output} was not written; give another text "
        "(--text), more of it (--tokens), or more --steps"
    )


def _pair(model: str, teacher: str, inputs: Inputs, provenance: Provenance | None) -> tuple[Decoder, Decoder]:
    """The pruned and the dense model, which belong together."""
    from lyapunov_prune.data.batch import require_context
    from lyapunov_prune.models.left_out import require_whole
    from lyapunov_prune.models.tokenizers import require_same_tokenizer

    loaded = inputs.load(model)
    require_context(loaded.structure, inputs.context)
    dense = inputs.load(teacher)
    if provenance is not None:
        provenance.require_dense(dense.model, teacher, model, "--teacher")
    require_same_tokenizer(dense.tokenizer, loaded.tokenizer, (teacher, model))
    require_whole(loaded.model)
    return loaded, dense


def _original(loaded: Decoder, dense: Decoder, own: bool, provenance: Provenance | None) -> Any:
    """The GGUF file that the healed one is made of: that of the pruned model, or the dense one without the layers."""
    from lyapunov_prune.export.gguf_original import original_of

    return original_of(loaded) if own or provenance is None else original_of(dense, provenance.plan)


def _write(
    model: str, output: Path, loaded: Decoder, done: Healed, original: Any, provenance: Provenance | None
) -> Path:
    """Write the healed model, as a copy of the GGUF file `original` if there is one; returns the file of the report."""
    from lyapunov_prune.checkpoints.saving import write_model
    from lyapunov_prune.export.gguf import save_changed
    from lyapunov_prune.healing.report import REPORT
    from lyapunov_prune.healing.state import KEPT
    from lyapunov_prune.models.decoder import wrap
    from lyapunov_prune.pruning.provenance import PROVENANCE

    held = done.report.held_out
    worth = None if held is None else held.after.worth(held.teacher)
    if original is not None:
        save_changed(output, original, wrap(done.model, loaded.tokenizer), provenance, worth)
        return done.report.save(begun_run(None, model, REPORT) / REPORT)
    results: dict[str, Result] = {REPORT: done.report}
    if provenance is not None:
        results[PROVENANCE] = provenance
    title = f"{Path(model).name}, healed"
    write_model(done.model, loaded.tokenizer, output, results, title, done.report.about(), KEPT, worth)
    return output / REPORT


def _origin(model: str, teacher: str | None) -> tuple[Provenance | None, str]:
    """What the pruned checkpoint says of its making, and the name of the dense model that teaches."""
    from lyapunov_prune.models.cache import BUILTIN
    from lyapunov_prune.pruning.provenance import made_by

    provenance = made_by(model)
    if teacher is not None:
        return provenance, teacher
    if provenance is None:
        raise LyapunovPruneError(_NO_ORIGIN.format(model))
    if provenance.source != BUILTIN:  # a file that may be a stranger's does not choose what is loaded
        raise LyapunovPruneError(
            f"{model} was made from {provenance.source!r}; if you trust that, give it: --teacher {provenance.source}"
        )
    return provenance, BUILTIN
