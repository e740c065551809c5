"""Commands about what a change does to the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lyapunov_prune.cli.inputs import draw_report, load_inputs, run_folder
from lyapunov_prune.cli.options import (
    BatchSize,
    Bos,
    Context,
    Device,
    DType,
    Json,
    Model,
    Offline,
    Output,
    Text,
    Tokens,
)
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError


def hierarchy(
    dense: Model,
    compressed: Annotated[str | None, typer.Argument(help="Made from DENSE: pruned, sparsified, rounded.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Tokens decoded after each prompt.")] = 16,
    temperature: Annotated[float, typer.Option(help="Of the softmax.")] = 1.0,
    choices: Annotated[
        Path | None, typer.Option(help="Multiple-choice items, a JSONL file of query, choices, gold; for COMPRESSED.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of the items; all if not given.")] = None,
    text: Text = "builtin",
    tokens: Tokens = 128,
    context: Context = 32,
    batch_size: BatchSize = 1,
    device: Device = "cpu",
    dtype: DType = None,
    bos: Bos = None,
    offline: Offline = False,
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
    from lyapunov_prune.models.loading import load
    from lyapunov_prune.models.tokenizers import require_same_tokenizer
    from lyapunov_prune.predictions.attention_paths import attention_paths
    from lyapunov_prune.predictions.choices import compare_choices
    from lyapunov_prune.predictions.generation import compare_generation
    from lyapunov_prune.predictions.hierarchy import probe_layers

    if choices is not None and compressed is None:
        raise LyapunovPruneError("--choices compares two models; give COMPRESSED too")
    items = load_items(choices) if choices else ()
    loaded, prompts = load_inputs(dense, text, tokens, context, device, dtype, bos, offline, "evaluation")
    other = None
    if compressed is not None:
        other = load(compressed, dtype=dtype, device=device, offline=offline)
        require_same_tokenizer(loaded.tokenizer, other.tokenizer, (dense, compressed))
    for model in (loaded.model, *([other.model] if other else [])):
        require_unseen(model, prompts)
    same_layers = other is not None and other.structure.num_layers == loaded.structure.num_layers
    probe = probe_layers(
        loaded.model,
        prompts,
        change=other.model if other is not None and same_layers else "dropped",
        steps=steps,
        temperature=temperature,
        batch_size=batch_size,
    )
    run = run_folder(output, dense)
    probe.save(run / "hierarchy.json")
    written = run / "hierarchy.json"
    show(probe, as_json, written)
    if other is not None:
        generated = compare_generation(loaded.model, other.model, prompts, steps=steps, temperature=temperature)
        written = generated.save(run / "generation.json")
        show(generated, as_json, written)
    if other is not None and same_layers:
        try:
            paths = attention_paths(loaded.model, other.model, prompts, steps=steps)
        except LyapunovPruneError as error:  # not every family lets its attention be seen
            say(f"no paths through attention: {error}")
        else:
            written = paths.save(run / "paths.json")
            show(paths, as_json, written)
    violated = len(probe.violations)
    if other is not None and items:
        answered = compare_choices(loaded.model, other.model, items, loaded.tokenizer, limit=limit)
        written = answered.save(run / "choices.json")
        show(answered, as_json, written)
        violated += len(answered.violations)
    draw_report(run)
    if violated:
        raise CheckFailed(f"{violated} bounds are violated; see {run}")
