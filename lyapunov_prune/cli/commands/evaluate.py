"""Score a model: perplexity, tasks, retrieval, repetition, speed."""

from __future__ import annotations

from typing import Annotated

from lyapunov_prune.cli import choices
from lyapunov_prune.cli.inputs import (
    begun_run,
    draw_report,
    load_inputs,
    require_retrieval,
    windows_at_once,
)
from lyapunov_prune.cli.options import (
    IN_MEMORY,
    Items,
    Json,
    Model,
    ModelOptions,
    Output,
    Stream,
    TextOptions,
    model_option,
    text_option,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import say, show


def evaluate(
    model: Model,
    *,
    speed: Annotated[bool, what_option("--speed", help="Measure prefill and decoding speed too.")] = False,
    tasks: Annotated[
        str | None, what_option(help="Score tasks too: .jsonl files, names of lm-evaluation-harness (piqa,arc_easy).")
    ] = None,
    limit: Items = None,
    retrieval: Annotated[
        str | None,
        what_option(
            metavar="QUERIES,DOCS[,QRELS]",
            help="Score retrieval too, by pooled states: .jsonl files of _id and text, and a .tsv of query, document, "
            "grade (qrels/test.tsv beside the queries if not given); texts are read up to --context tokens.",
        ),
    ] = None,
    few_shot: Annotated[
        int | None, what_option(min=0, help="Examples before an item: the first of the file. None, or the task's own.")
    ] = None,
    against: Annotated[
        str | None, model_option(help="A reference model, measured in the same run (the dense one).")
    ] = None,
    engine: Annotated[
        choices.Engine | None,
        model_option(help="Run the .gguf files there too: perplexity of the same windows, and speed."),
    ] = None,
    stream: Stream = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    split: Annotated[choices.Split, text_option(help="Which half of the text.")] = "evaluation",
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Perplexity, and on request speed, tasks and retrieval, and what an engine makes of it; writes eval.json."""
    from lyapunov_prune.data.retrieval import load_retrieval
    from lyapunov_prune.data.unseen import require_unseen
    from lyapunov_prune.evaluation.engine import engine_files, engine_scores
    from lyapunov_prune.evaluation.evaluation import Evaluation, zero_share
    from lyapunov_prune.evaluation.perplexity import perplexity
    from lyapunov_prune.evaluation.retrieval import evaluate_retrieval
    from lyapunov_prune.evaluation.speed import measure_speed, prompt_for
    from lyapunov_prune.evaluation.tasks import evaluate_tasks, load_tasks
    from lyapunov_prune.models.quantised import is_packed, quantisation
    from lyapunov_prune.models.tokenizers import require_same_tokenizer

    if tasks is None:
        given.refuse("is of the items of tasks; give --tasks with it", "limit", "few_shot")
    if stream:
        given.refuse(IN_MEMORY, "speed", "tasks", "retrieval", "engine")
    names = [against, model] if against else [model]
    files = engine_files(names) if engine is not None else []
    run = begun_run(output, model, "eval.json")
    chosen = load_tasks(tasks.split(","), few_shot=few_shot) if tasks is not None else None
    sought = load_retrieval(*require_retrieval(retrieval)) if retrieval is not None else None
    first, batch = load_inputs(names[0], source, text, split, stream=stream)
    batch_size = windows_at_once(first, text.context)
    prompt = prompt_for(first.structure)
    models = {names[0]: first.model}
    for name in names[1:]:
        other = source.load(name, stream=stream)
        require_same_tokenizer(first.tokenizer, other.tokenizer, (names[0], name))
        models[name] = other.model
    for evaluated in models.values():
        require_unseen(evaluated, batch)
    # First: what cannot be scored is found before the perplexity is measured.
    scored = evaluate_tasks(models, first.tokenizer, chosen, limit=limit, batch_size=batch_size) if chosen else None
    found = (
        evaluate_retrieval(models, first.tokenizer, sought, context=text.context, batch_size=batch_size)
        if sought
        else None
    )
    perplexities = tuple(perplexity(m, batch, batch_size=batch_size) for m in models.values())
    result = Evaluation(
        perplexities=perplexities,
        zeros=tuple(zero_share(m) for m in models.values()),
        speed=measure_speed(models, prompt=prompt) if speed else None,
        tasks=scored,
        retrieval=found,
        engine=engine_scores(files, perplexities, batch, prompt=prompt) if files else None,
    )
    result.save(run / "eval.json")
    draw_report(run)
    show(result, as_json, run / "eval.json")
    for part in () if as_json else result.further():
        show(part, as_json, None, kept=run / "eval.json", answered=True)
    unpacked = [name for name, m in models.items() if quantisation(m.config) and not is_packed(m)]
    if speed and unpacked and not as_json:
        say(f"The packed weights of {', '.join(unpacked)} were unpacked on loading: these are speeds of dense ones.")
