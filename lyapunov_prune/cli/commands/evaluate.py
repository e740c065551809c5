"""Score a model: perplexity, tasks, repetition, speed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, conclude, load_inputs, require_ratio, windows_at_once
from lyapunov_prune.cli.options import IN_MEMORY, FailAbove, Items, Model, RunOptions, model_option, what_option
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.scored import by_name, scored
from lyapunov_prune.cli.terminal import note, say, show
from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.data.batch import TokenBatch
    from lyapunov_prune.evaluation.engine import EngineScores
    from lyapunov_prune.evaluation.perplexity import Perplexity


def evaluate(
    model: Model,
    *,
    speed: Annotated[
        bool,
        what_option(
            "--speed",
            help="Also measure the speed of prefill and decoding; of .gguf files also in llama.cpp, with the "
            "perplexity of the same windows, which must agree (needs xllamacpp).",
        ),
    ] = False,
    tasks: Annotated[
        str | None,
        checks.ITEMS,
        what_option(help="Also score tasks: .jsonl files or names of lm-evaluation-harness (piqa,arc_easy)."),
    ] = None,
    limit: Items = None,
    few_shot: Annotated[
        int | None, what_option(min=0, help="Number of examples before each item; default: that of the task.")
    ] = None,
    against: Annotated[
        str | None,
        checks.MODEL,
        model_option(help="A reference model to measure in the same run, usually the dense one."),
    ] = None,
    fail_above: FailAbove = None,
    inputs: RunOptions = RunOptions(),
    given: Given = Given(),
) -> None:
    """Measure perplexity, and on request speed and tasks; writes eval.json."""
    if tasks is None:
        given.refuse("applies to the items of tasks; give --tasks with it", "limit", "few_shot")
    if against is None:
        given.refuse("compares with the dense model; give --against with it", "fail_above")
    if against == model:
        raise LyapunovPruneError(f"--against names {model} itself; name the model that it was made from")
    if inputs.disk:
        given.refuse(IN_MEMORY, "speed", "tasks")

    from lyapunov_prune.evaluation.speed import measure_speed, prompt_for
    from lyapunov_prune.evaluation.tasks import evaluate_tasks, load_tasks

    names = [against, model] if against else [model]
    run = begun_run(inputs.output, model, "eval.json")
    chosen = load_tasks(tasks.split(","), few_shot=few_shot) if tasks is not None else None
    first, batch = load_inputs(names[0], inputs, "evaluation")
    batch_size = windows_at_once(first, inputs.context)
    prompt = prompt_for(first.structure)
    models = by_name(first, names, inputs, batch)
    # First: what cannot be scored is found before the perplexity is measured.
    answered = evaluate_tasks(models, first.tokenizer, chosen, limit=limit, batch_size=batch_size) if chosen else None
    result = replace(scored(models, batch, batch_size), tasks=answered)
    if speed:
        timed, engine = measure_speed(models, prompt=prompt), _in_llama_cpp(names, result.perplexities, batch, prompt)
        result = replace(result, speed=timed, engine=engine)
    written = conclude(run, "eval.json", result)
    for part in result.further():
        show(part, None, kept=written, answered=True)
    if speed:
        _say_unpacked(models, in_llama_cpp=result.engine is not None)
    if result.engine is not None:
        result.engine.require_same()
    require_ratio(result, fail_above)


def _say_unpacked(models: dict[str, PreTrainedModel], *, in_llama_cpp: bool) -> None:
    """Say which models have packed weights that loading unpacked, since that is what was timed."""
    from lyapunov_prune.models.quantised import is_packed, quantisation

    unpacked = [name for name, model in models.items() if quantisation(model.config) and not is_packed(model)]
    if unpacked:
        say(f"The packed weights of {', '.join(unpacked)} were unpacked on loading: these are speeds of dense ones.")
    files = [name for name in models if name.endswith(".gguf")]
    if files and not in_llama_cpp:
        say(
            f"{', '.join(files)} ran dequantised, in PyTorch: llama.cpp, which is faster, times .gguf files "
            "only (extra engines); export the other model as one."
        )


def _in_llama_cpp(
    names: list[str], perplexities: tuple[Perplexity, ...], batch: TokenBatch, prompt: int
) -> EngineScores | None:
    """The scores of GGUF files in llama.cpp; None for other models, or if llama.cpp does not run them, with a note."""
    from lyapunov_prune.evaluation.engine import engine_files, engine_scores

    try:
        files = engine_files(names)
        return engine_scores(files, perplexities, batch, prompt=prompt) if files else None
    except LyapunovPruneError as error:
        note(f"not run in llama.cpp: {error.message}")
        return None
