"""Heal a pruned checkpoint from the model it was cut out of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lyapunov_prune.cli.inputs import begun_run, format_for, jobs_folder, load_judge
from lyapunov_prune.cli.options import (
    Json,
    Judge,
    ModelOptions,
    Resume,
    Seed,
    Target,
    TextOptions,
    model_option,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import note, show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.progress import is_main

if TYPE_CHECKING:
    from lyapunov_prune.pruning.provenance import Provenance
    from lyapunov_prune.results.result import Result


def heal(
    model: Annotated[str, typer.Argument(help="Folder or .gguf file of a pruned model.")],
    *,
    steps: Annotated[
        int | None, what_option(min=1, help="Training steps at the most; 100 where --minutes is not given either.")
    ] = None,
    minutes: Annotated[float | None, what_option(help="Minutes of training at the most.")] = None,
    per_step: Annotated[
        int, what_option(min=1, help="Windows of a step; accelerate launch shares them among processes.")
    ] = 1,
    update_rank: Annotated[
        int | None, what_option(min=1, help="Train updates of this rank; else all of the layers.")
    ] = None,
    seed: Seed = 0,
    checkpointing: Annotated[
        bool, what_option("--checkpointing", help="Run layers again for the backward pass: less memory, more time.")
    ] = False,
    shard: Annotated[
        bool, what_option("--shard", help="Each process of accelerate launch holds but its part of the layers.")
    ] = False,
    teacher: Annotated[
        str | None, model_option(help="The dense model; not needed for what was made from the built-in one.")
    ] = None,
    source: ModelOptions = ModelOptions(dtype="float32"),
    text: TextOptions = TextOptions(text="self", tokens=25600, context=256),
    judge: Judge = None,
    resume: Resume = False,
    output: Target,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Train a pruned model to predict what the dense one predicts; writes a plain checkpoint with healing.json.

    An --output that ends in .gguf is a GGUF file: that of MODEL, or of the dense model without the layers, with the
    tensors that healing changed written anew; healing.json goes to runs/MODEL.

    Learns from text that the dense model writes, or from the calibration half of --text. Some windows of it, or those
    of --judge, teach nothing: they judge, and the weights that are best on them are written. Where nothing beats the
    pruned model, nothing is written and the exit code is 1. What is written is scored on text that taught and judged
    nothing, in windows of 512 tokens as by eval if --context is not given. Interrupted, heal goes on with the same
    --output and --resume.
    """
    source.require_one_place("heal")

    from lyapunov_prune.checkpoints.saving import write_model
    from lyapunov_prune.checkpoints.shards import size_of
    from lyapunov_prune.data.batch import require_context
    from lyapunov_prune.data.text import require_source
    from lyapunov_prune.export.gguf import original_of, save_changed, source_file
    from lyapunov_prune.export.table import FORMATS
    from lyapunov_prune.healing.heal import heal as heal_model
    from lyapunov_prune.healing.report import REPORT
    from lyapunov_prune.healing.sharded import sharing
    from lyapunov_prune.healing.state import KEPT
    from lyapunov_prune.healing.trained import require_few, require_trainable
    from lyapunov_prune.models.decoder import wrap
    from lyapunov_prune.models.left_out import require_whole
    from lyapunov_prune.models.tokenizers import require_same_tokenizer
    from lyapunov_prune.pruning.provenance import PROVENANCE
    from lyapunov_prune.pruning.surgery import share_memory
    from lyapunov_prune.results.files import require_disk

    stored = FORMATS.make(format_for(output, "plain", given))
    stored.require_target(output)
    jobs = jobs_folder("heal", model, output)
    # Before the dense model writes for minutes.
    require_few(per_step * (steps or 0))
    if shard:
        sharing(per_step, update_rank)
    provenance, teacher = _origin(model, teacher)
    own = provenance is None or model.endswith(".gguf")  # the file that the healed one is made of
    if stored.name == "gguf":
        source_file(model if own else teacher)
    require_source(text.text)  # before minutes of loading
    loaded = source.load(model)
    require_context(loaded.structure, text.context)
    dense = source.load(teacher)
    if provenance is not None:
        provenance.require_dense(dense.model, teacher, model, "--teacher")
    require_same_tokenizer(dense.tokenizer, loaded.tokenizer, (teacher, model))
    require_whole(loaded.model)
    require_trainable(loaded.model, "the pruned model", update_rank)
    require_disk(output, size_of(loaded.model), "the files of the healed model")
    if provenance is not None:
        share_memory(loaded.model, dense, provenance.plan)
    original = None
    if stored.name == "gguf":
        original = original_of(loaded) if own or provenance is None else original_of(dense, provenance.plan)
    if jobs.is_dir() and not resume and is_main():
        _clear(jobs, [])  # refused while that run is at work, before the dense model writes for minutes
        note("The training that an earlier run left unfinished was deleted; --resume would have gone on with it.")
    texts = [jobs.with_name(f"{jobs.name}-{name}") for name in ("text", "scored")]
    batch = text.load(dense, "calibration", folder=texts[0], resume=resume)
    # As eval scores, if not told otherwise: perplexities in shorter windows are higher.
    context = text.context if "context" in given else loaded.structure.at_most(TextOptions.context)
    held_out = text.as_eval(context).load(dense, "evaluation", folder=texts[1], resume=resume)
    judging = None if judge is None else load_judge(judge, dense, batch, text, share=8)
    done = heal_model(
        loaded.model,
        dense.model,
        batch,
        steps=steps,
        minutes=minutes,
        per_step=per_step,
        rank=update_rank,
        seed=seed,
        folder=jobs,
        resume=resume,
        judge=judging,
        evaluation=held_out,
        checkpointing=checkpointing,
        shard=shard,
    )
    if not is_main():  # of the processes that shared the steps
        return
    if done.report.kept < 0:
        _clear(jobs, texts)
        show(done.report, as_json, None)
        raise CheckFailed(
            f"healing did not beat the pruned model on the windows that judged, and {output} was not written; give "
            "another text (--text), more of it (--tokens), or more steps"
        )
    if original is not None:
        save_changed(output, original, wrap(done.model, loaded.tokenizer), provenance)
        kept = done.report.save(begun_run(None, model, REPORT) / REPORT)
    else:
        results: dict[str, Result] = {REPORT: done.report}
        if provenance is not None:
            results[PROVENANCE] = provenance
        title = f"{Path(model).name}, healed"
        write_model(done.model, loaded.tokenizer, output, results, title, done.report.about(), KEPT)
        kept = output / REPORT
    _clear(jobs, texts)
    show(done.report, as_json, output, kept=kept)


def _origin(model: str, teacher: str | None) -> tuple[Provenance | None, str]:
    """What the pruned checkpoint says of its making, and the name of the dense model that teaches."""
    from lyapunov_prune.models.cache import BUILTIN
    from lyapunov_prune.pruning.provenance import made_by

    provenance = made_by(model)
    if teacher is not None:
        return provenance, teacher
    if provenance is None:
        raise LyapunovPruneError(f"{model} does not say what it was made from; give the dense model as --teacher")
    if provenance.source != BUILTIN:  # a file that may be a stranger's does not choose what is loaded
        raise LyapunovPruneError(
            f"{model} says that it was made from {provenance.source!r}; if you trust it, give that as --teacher"
        )
    return provenance, BUILTIN


def _clear(jobs: Path, texts: list[Path]) -> None:
    """Delete the state of the training, four times the size of what was trained, and the texts that were written."""
    from lyapunov_prune.forward.own_text import clear_text
    from lyapunov_prune.healing.state import clear_states

    clear_states(jobs)
    for folder in texts:
        clear_text(folder)
