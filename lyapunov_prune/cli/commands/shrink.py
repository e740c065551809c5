"""Make a smaller model in one command."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from lyapunov_prune.arguments import Range
from lyapunov_prune.cli import choices
from lyapunov_prune.cli.inputs import begun_run, draw_report, jobs_folder, load_beside, windows_at_once
from lyapunov_prune.cli.options import (
    ABOVE_ZERO,
    Json,
    Judge,
    Model,
    ModelOptions,
    Resume,
    Target,
    TextOptions,
    counted,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import note, say, show
from lyapunov_prune.errors import LyapunovPruneError


def shrink(
    model: Model,
    *,
    remove: Annotated[float | None, ABOVE_ZERO, what_option(help="How many layers go.", **counted)] = None,
    speedup: Annotated[
        float | None,
        Range(1, above=True),
        what_option(help="Instead: how many times as fast a forward gets, measured here."),
    ] = None,
    max_kl: Annotated[
        float | None,
        ABOVE_ZERO,
        what_option("--max-kl", help="Instead: the most layers within so many nats a token of the dense predictions."),
    ] = None,
    max_drop: Annotated[
        str | None,
        what_option(
            metavar="TASK:DROP",
            help="Instead: the most layers that let the score of a task fall by DROP, as gsm8k:0.02. TASK is one of "
            "lm-evaluation-harness or a .jsonl file, as of eval --tasks; every second item chooses, the others are "
            "reported. Take one with generated answers first, as gsm8k: multiple choice hides what arithmetic loses.",
        ),
    ] = None,
    what: Annotated[
        choices.Shrunk,
        what_option(
            help="Whole layers; or layers and hidden channels, or layers and experts, split by measured loss, with "
            "--remove 25% of the parameters of the layers."
        ),
    ] = "layers",
    minutes: Annotated[
        float | None,
        ABOVE_ZERO,
        what_option(help="Minutes for all of it; if not given, what 100 steps of healing take."),
    ] = None,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(text="self", tokens=25600, context=256),
    judge: Judge = None,
    resume: Resume = False,
    output: Target,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Make a smaller model: choose layers, remove them, mend, heal, check, evaluate; writes a plain checkpoint.

    One target says how much goes. Mending and healing are kept only where text that they did not learn from says that
    they pay. What it will take is said first. The text that teaches is written by the model itself if no --text is
    given. Interrupted, it goes on with the same --output and --resume. An --output that ends in .gguf is MODEL's GGUF
    file without the layers, and only what changed is written anew; the report goes to runs/MODEL.
    """
    source.require_one_place("shrink")

    from lyapunov_prune.data.text import require_source
    from lyapunov_prune.evaluation.tasks import halves
    from lyapunov_prune.export.copied import too_large
    from lyapunov_prune.forward.own_text import SELF
    from lyapunov_prune.models.device import resolve_device
    from lyapunov_prune.shrinking.report import REPORT
    from lyapunov_prune.shrinking.request import Request
    from lyapunov_prune.shrinking.shrink import carry_out
    from lyapunov_prune.shrinking.target import Target as Wanted
    from lyapunov_prune.shrinking.texts import Texts, wide_context
    from lyapunov_prune.shrinking.written import is_gguf, require_output

    wanted = Wanted.of(remove, speedup, max_kl, max_drop, what)
    require_output(model, output, what)
    report = begun_run(None, model, REPORT, "eval.json") if is_gguf(output) else output
    folder = jobs_folder("shrink", model, output)
    own = text.text == SELF
    if own:
        if judge == SELF:
            raise LyapunovPruneError(
                "the model writes the text that teaches, and another one judges; give it as --judge"
            )
    else:
        require_source(text.text)  # before minutes of loading
    items = None if wanted.task is None else halves(wanted.task)
    if items is not None and not items[0].generates:
        note(
            f"{items[0].name} is answered by choosing, which hides what arithmetic and free answers lose; a task with "
            "generated answers, as gsm8k, shows it"
        )
    why = too_large(model, resolve_device(source.device))
    if why:
        raise LyapunovPruneError(
            f"shrink needs the model in memory ({why}); rank --stream --criterion angular --remove N and prune "
            "--stream --plan remove layers without it, and heal nothing"
        )
    loaded = source.load(model)
    learn = held_out = choose = second = None
    if not own:
        learn = text.load(loaded, "calibration")
        wide = loaded.structure.at_most(TextOptions.context)
        held_out = text.as_eval(wide).load(loaded, "evaluation")
        width = wide_context(loaded.structure, learn.tokens, learn.context)
        if width != learn.context:
            choose = replace(text, context=width).load(loaded, "calibration")
    texts = Texts(learn, None, held_out, text.tokens, text.context, choose)
    if judge is not None and judge != SELF:
        texts.require(loaded.model)
        windows, width = texts.searched(loaded.model)
        second = load_beside(judge, loaded, windows // 2, replace(text, context=width))
    request = Request(
        loaded.model,
        loaded.tokenizer,
        wanted,
        replace(texts, judge=second),
        items=items,
        minutes=minutes,
        batch_size=windows_at_once(loaded, text.context),
        folder=folder,
        resume=resume,
        words=_words(text, judge, own),
        source=_source(source),
    )
    done = carry_out(request, output, lambda expected: note("\n".join(expected.answer())))
    if report != output:
        done.report.save(report / REPORT)
        done.report.evaluation.save(report / "eval.json")
    draw_report(report)
    show(done.report, as_json, None, kept=report / REPORT)
    if not as_json:
        say(f"Report: {report / 'report.html'}")


def _words(text: TextOptions, judge: str | None, own: bool) -> tuple[str, ...]:
    """The options that name the texts, as they would be given to `prune`."""
    words = [] if own else ["--text", text.text]
    return (*words, *([] if judge is None else ["--judge", judge]))


def _source(source: ModelOptions) -> tuple[str, ...]:
    """The options that say which numbers are loaded."""
    return () if source.dtype is None else ("--dtype", source.dtype)
