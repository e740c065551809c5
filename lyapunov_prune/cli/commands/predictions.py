"""Commands about what a change does to the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lyapunov_prune.cli.inputs import begun_run, draw_report, load_inputs
from lyapunov_prune.cli.options import Items, Json, Model, ModelOptions, Output, Temperature, TextOptions, what_option
from lyapunov_prune.cli.terminal import Parts, note
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError


def hierarchy(
    dense: Model,
    compressed: Annotated[str | None, typer.Argument(help="Made from DENSE: pruned, sparsified, rounded.")] = None,
    *,
    new_tokens: Annotated[int, what_option(min=1, help="How many to decode after each prompt.")] = 16,
    temperature: Temperature = 1.0,
    choices: Annotated[
        Path | None,
        what_option(help="Multiple-choice items, a JSONL file of query, choices, gold; for COMPRESSED."),
    ] = None,
    limit: Items = None,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(tokens=128, context=32),
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Follow a change from hidden state to logits to probabilities; writes hierarchy.json and what follows.

    Each layer by itself is replaced by that of COMPRESSED, or dropped where COMPRESSED has fewer or is not given, in
    the dense model's own context; estimates and proven bounds stand beside what is measured. With COMPRESSED both
    models then decode on their own (generation.json, paths.json), and answer --choices (choices.json). Prompts are
    windows of --context tokens. Exit code 1 on a violated bound.
    """
    from lyapunov_prune.data.choices import load_items
    from lyapunov_prune.data.text import require_unseen
    from lyapunov_prune.models.tokenizers import require_same_tokenizer
    from lyapunov_prune.predictions.attention_paths import attention_paths
    from lyapunov_prune.predictions.choices import compare_choices, fitting
    from lyapunov_prune.predictions.generation import compare_generation
    from lyapunov_prune.predictions.hierarchy import probe_layers

    if choices is not None and compressed is None:
        raise LyapunovPruneError("--choices compares two models; give COMPRESSED too")
    items = load_items(choices) if choices else ()
    written = ["hierarchy.json", *(["generation.json", "paths.json"] if compressed else [])]
    run = begun_run(output, dense, *written, *(["choices.json"] if choices else []))
    loaded, prompts = load_inputs(dense, source, text, "evaluation")
    other = None
    if compressed is not None:
        other = source.load(compressed)
        require_same_tokenizer(loaded.tokenizer, other.tokenizer, (dense, compressed))
    for model in (loaded.model, *([other.model] if other else [])):
        require_unseen(model, prompts)
    if other is not None and items:
        fitting(items, loaded.tokenizer, (loaded.model, other.model), limit)  # before minutes of decoding
    same_layers = other is not None and other.structure.num_layers == loaded.structure.num_layers
    probe = probe_layers(
        loaded.model,
        prompts,
        change=other.model if other is not None and same_layers else "dropped",
        steps=new_tokens,
        temperature=temperature,
        batch_size=text.batch_size,
    )
    parts = Parts(run, as_json)
    parts.add("hierarchy", probe)
    if other is not None:
        generated = compare_generation(loaded.model, other.model, prompts, steps=new_tokens, temperature=temperature)
        parts.add("generation", generated)
    if other is not None and same_layers:
        try:
            paths = attention_paths(loaded.model, other.model, prompts, steps=new_tokens)
        except LyapunovPruneError as error:  # not every family lets its attention be seen
            note(f"no paths through attention: {error}")
        else:
            parts.add("paths", paths)
    violated = len(probe.violations)
    if other is not None and items:
        answered = compare_choices(loaded.model, other.model, items, loaded.tokenizer, limit=limit)
        parts.add("choices", answered)
        violated += len(answered.violations)
    draw_report(run)
    parts.end()
    if violated:
        raise CheckFailed(f"{violated} bounds are violated; see {run}")
