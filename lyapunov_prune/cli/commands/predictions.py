"""Commands about what a change does to the predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyapunov_prune.cli.inputs import begun_run, draw_report, load_prompted, require_retrieval, windows_at_once
from lyapunov_prune.cli.options import (
    Items,
    Json,
    Model,
    ModelOptions,
    Output,
    TextOptions,
    text_option,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import Parts, note
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.models.decoder import Decoder


def hierarchy(
    dense: Model,
    compressed: Annotated[str | None, typer.Argument(help="Made from DENSE: pruned, sparsified, rounded.")] = None,
    *,
    new_tokens: Annotated[int, what_option(min=1, help="How many to decode after each prompt.")] = 16,
    choices: Annotated[
        Path | None,
        what_option(help="Multiple-choice items, a JSONL file of query, choices, gold; for COMPRESSED."),
    ] = None,
    limit: Items = None,
    retrieval: Annotated[
        str | None,
        what_option(metavar="QUERIES,DOCS[,QRELS]", help="Retrieval with both models, as for eval: retrieval.json."),
    ] = None,
    prompts: Annotated[
        Path | None,
        text_option(
            help="Own prompts in place of windows of --text: one a line, or rows of text, messages or conversations."
        ),
    ] = None,
    chat: Annotated[
        bool, text_option("--chat", help="--prompts are what a user says: through the chat template.")
    ] = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(tokens=128, context=32),
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Follow a change from hidden state to logits to probabilities; writes hierarchy.json and what follows.

    Each layer by itself is replaced by that of COMPRESSED, or dropped where COMPRESSED has fewer or is not given, in
    the dense model's own context; estimates and proven bounds stand beside what is measured. With COMPRESSED both
    models then decode on their own (generation.json, paths.json), COMPRESSED also reads the dense text
    (diverged-history.json), both answer --choices (choices.json), and verdict.json says which kinds of task stay.
    Prompts are windows of --context tokens, or --prompts. Exit code 1 on a violated bound.
    """
    from lyapunov_prune.data.choices import load_items
    from lyapunov_prune.data.prompts import Prompts
    from lyapunov_prune.data.retrieval import load_retrieval
    from lyapunov_prune.data.unseen import require_unseen, require_unseen_items
    from lyapunov_prune.evaluation.retrieval import evaluate_retrieval, require_unseen_texts
    from lyapunov_prune.forward.decoding import greedy_text
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.structure import identify
    from lyapunov_prune.models.tokenizers import require_same_tokenizer
    from lyapunov_prune.predictions.attention_paths import attention_paths
    from lyapunov_prune.predictions.choices import compare_choices, fitting
    from lyapunov_prune.predictions.generation import compare_generation
    from lyapunov_prune.predictions.hierarchy import probe_layers
    from lyapunov_prune.predictions.history import history_divergence
    from lyapunov_prune.predictions.verdict import task_verdict

    if compressed is None:
        given.refuse("compares two models; give COMPRESSED too", "choices", "retrieval")
    if choices is None:
        given.refuse("is of the items of a file; give --choices FILE with it", "limit")
    sought = load_retrieval(*require_retrieval(retrieval)) if retrieval is not None else None
    items = load_items(choices) if choices else ()
    of_two = ("generation", "paths", "diverged-history", "verdict") if compressed else ()
    asked = [name for name, wanted in (("choices", choices), ("retrieval", retrieval)) if wanted]
    run = begun_run(output, dense, *(f"{name}.json" for name in ("hierarchy", *of_two, *asked)))
    loaded, batch = load_prompted(dense, source, text, prompts, chat, given)
    batch_size = windows_at_once(loaded, batch.context)
    most = loaded.structure.max_context
    if most and batch.context + new_tokens - 1 > most:
        raise LyapunovPruneError(
            f"{batch.context} tokens and {new_tokens} behind them are more than the {most} of the model's context; "
            "lower --new-tokens or --context"
        )
    other = None
    if compressed is not None:
        other = source.load(compressed)
        require_same_tokenizer(loaded.tokenizer, other.tokenizer, (dense, compressed))
        _require_made_from(loaded, other, (dense, compressed))
    for model in (loaded.model, *([other.model] if other else [])):
        require_unseen(model, batch)
        if isinstance(batch, Prompts):
            require_unseen_items(model, loaded.tokenizer, batch.said, batch.text, "prompts")
    if other is not None and items:  # before minutes of decoding
        fitting(items, loaded.tokenizer, (loaded.model, other.model), limit)
    if other is not None and sought is not None:
        require_unseen_texts({dense: loaded.model, str(compressed): other.model}, loaded.tokenizer, sought)
    reading = read(loaded, batch)
    dense_text = greedy_text(reading, new_tokens, batch_size)
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
    parts = Parts(run, as_json)
    parts.add("hierarchy", probe)
    if other is not None:
        pair = loaded.model, other.model, reading
        at_once: Any = {"steps": new_tokens, "batch_size": batch_size}
        generated = compare_generation(*pair, **at_once)
        parts.add("generation", generated)
        both = dense_text, greedy_text(read(other, batch), new_tokens, batch_size)
        history = history_divergence(*pair, **at_once, written=both)
        parts.add("diverged-history", history)
    if other is not None and same_layers:
        try:
            paths = attention_paths(*pair, steps=new_tokens, written=both)
        except LyapunovPruneError as error:  # not every family lets its attention be seen
            note(f"no paths through attention: {error.message}")
        else:
            parts.add("paths", paths)
    violated = len(probe.violations)
    answered = found = None
    if other is not None and items:
        answered = compare_choices(loaded.model, other.model, items, loaded.tokenizer, limit=limit)
        parts.add("choices", answered)
        violated += len(answered.violations)
    if other is not None and sought is not None:
        assert compressed is not None
        models = {dense: loaded.model, compressed: other.model}
        found = evaluate_retrieval(models, loaded.tokenizer, sought, batch_size=batch_size)
        parts.add("retrieval", found)
    if other is not None:
        parts.add("verdict", task_verdict(generated, history, choices=answered, retrieval=found))
    draw_report(run)
    parts.end()
    if violated:
        raise CheckFailed(f"{violated} bounds are violated; see {run}")


def _require_made_from(dense: Decoder, other: Decoder, names: tuple[str, str]) -> None:
    """Raise LyapunovPruneError where `other`, the second of `names`, cannot have been made from `dense`.

    A checkpoint's provenance names the model of its last removal, so it decides where that was the first step.
    """
    from lyapunov_prune.pruning.provenance import made_by
    from lyapunov_prune.results.history import history_of

    mine, theirs = (
        {
            "family": loaded.structure.model_type,
            "width": getattr(loaded.structure.config, "hidden_size", None),
            "vocabulary": getattr(loaded.structure.config, "vocab_size", None),
        }
        for loaded in (dense, other)
    )
    for what, value in mine.items():
        if theirs[what] != value:
            raise LyapunovPruneError(
                f"{names[1]} has another {what} than {names[0]} ({theirs[what]}, not {value}); give a model that was "
                "made from it"
            )
    made = made_by(names[1])
    removals = [step.kind for step in history_of(other.model).steps if step.kind != "heal"]
    if made is not None and removals == ["prune"]:
        made.require_dense(dense.model, *names, "DENSE")
