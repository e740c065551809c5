"""Commands about what a change does to the predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, draw_report, load_inputs, require_bounds, windows_at_once
from lyapunov_prune.cli.options import Inputs, Model, RunOptions, what_option
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import keep

if TYPE_CHECKING:
    from lyapunov_prune.forward.reading import Reading
    from lyapunov_prune.models.decoder import Decoder


def hierarchy(
    dense: Model,
    compressed: Annotated[
        str | None, checks.MODEL, typer.Argument(help="A model made from DENSE: pruned, sparse, rounded.")
    ] = None,
    *,
    new_tokens: Annotated[int, what_option(min=1, help="Number of tokens to decode after each prompt.")] = 16,
    choices: Annotated[
        Path | None,
        checks.FILE,
        what_option(help="Multiple-choice items for both models: a .jsonl file of query, choices, gold."),
    ] = None,
    inputs: RunOptions = RunOptions(tokens=128, context=32),
    given: Given = Given(),
) -> None:
    """Follow a change from hidden state to logits to probabilities; writes hierarchy.json and more.

    One layer at a time is replaced by that of COMPRESSED, or dropped if COMPRESSED has fewer layers or is not given, in
    the context of the dense model; estimates and proven bounds are shown beside the measurements. With COMPRESSED both
    models also decode on their own (generation.json), COMPRESSED reads the dense text
    (diverged-history.json), both answer --choices (choices.json), and verdict.json says which kinds of task survive.
    Prompts are windows of --context tokens. The exit code is 1 if a bound is violated.
    """
    inputs.require_loaded("hierarchy")
    if compressed is None:
        given.refuse("compares two models; give COMPRESSED as well", "choices")

    from lyapunov_prune.data.choices import load_items
    from lyapunov_prune.data.unseen import require_unseen
    from lyapunov_prune.forward.decoding import greedy_text
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.structure import identify
    from lyapunov_prune.predictions.choices import fitting
    from lyapunov_prune.predictions.hierarchy import probe_layers

    items = load_items(choices) if choices else ()
    of_two = ("generation", "diverged-history", "verdict") if compressed else ()
    asked = ["choices"] if choices else []
    run = begun_run(inputs.output, dense, *(f"{name}.json" for name in ("hierarchy", *of_two, *asked)))
    loaded, batch = load_inputs(dense, inputs, "evaluation")
    batch_size = windows_at_once(loaded, batch.context)
    reading = read(loaded, batch, new_tokens - (compressed is None))
    other = None if compressed is None else _other(loaded, inputs, (dense, compressed))
    for model in (loaded.model, *([other.model] if other else [])):
        require_unseen(model, batch)
    if other is not None and items:  # before minutes of decoding
        fitting(items, loaded.tokenizer, (loaded.model, other.model), None)
    dense_text = greedy_text(reading, batch_size, new_tokens)
    same_layers = other is not None and other.structure.num_layers == loaded.structure.num_layers
    probe = probe_layers(
        loaded.model,
        reading,
        change=other.model if other is not None and same_layers else "dropped",
        steps=new_tokens,
        batch_size=batch_size,
        written=dense_text,
    )
    if other is not None and not same_layers:
        probe = replace(probe, beside=identify(other.model))
    keep(run, "hierarchy", probe)
    violated = len(probe.violations)
    if other is not None:
        violated += _compare(run, loaded, other, reading, dense_text, items, new_tokens, batch_size)
    draw_report(run)
    require_bounds(not violated, violated, run)


def _other(loaded: Decoder, inputs: Inputs, names: tuple[str, str]) -> Decoder:
    """The second model of `names`, which was made from the first, `loaded`."""
    from lyapunov_prune.models.tokenizers import require_same_tokenizer

    other = inputs.load(names[1])
    require_same_tokenizer(loaded.tokenizer, other.tokenizer, names)
    _require_made_from(loaded, other, names)
    return other


def _compare(
    run: Path,
    dense: Decoder,
    other: Decoder,
    reading: Reading,
    dense_text: Any,
    items: Any,
    new_tokens: int,
    batch_size: int,
) -> int:
    """What `dense` and `other` write and answer; returns the violated bounds."""
    from lyapunov_prune.forward.decoding import greedy_text
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.predictions.choices import compare_choices
    from lyapunov_prune.predictions.generation import compare_generation
    from lyapunov_prune.predictions.history import history_divergence
    from lyapunov_prune.predictions.verdict import task_verdict

    models = dense.model, other.model
    at_once: Any = {"steps": new_tokens, "batch_size": batch_size}
    generated = compare_generation(*models, reading, **at_once)
    keep(run, "generation", generated)
    theirs = read(other, reading.batch)
    both = dense_text, greedy_text(theirs, batch_size, new_tokens)
    history = history_divergence(*models, reading, **at_once, written=both)
    keep(run, "diverged-history", history)
    answered = None
    if items:
        answered = compare_choices(*models, items, dense.tokenizer)
        keep(run, "choices", answered)
    keep(run, "verdict", task_verdict(generated, history, choices=answered))
    return 0 if answered is None else len(answered.violations)


def _require_made_from(dense: Decoder, other: Decoder, names: tuple[str, str]) -> None:
    """Raise LyapunovPruneError where `other`, the second of `names`, cannot have been made from `dense`.

    A checkpoint's provenance names the model of its last removal, so it decides where that was the first step.
    """
    from lyapunov_prune.models.structure import require_versions
    from lyapunov_prune.pruning.provenance import made_by
    from lyapunov_prune.results.history import history_of

    require_versions(dense.structure, other.structure)
    made = made_by(names[1])
    removals = [step.kind for step in history_of(other.model).steps if step.kind != "heal"]
    if made is not None and removals == ["prune"]:
        made.require_dense(dense.model, *names, "DENSE")
