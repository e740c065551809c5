"""Make a smaller model in one command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, draw_report, load_beside, load_inputs, require_ratio, windows_at_once
from lyapunov_prune.cli.jobs import jobs_folder
from lyapunov_prune.cli.options import (
    ABOVE_ZERO,
    FailAbove,
    FileTarget,
    Inputs,
    Judge,
    Model,
    TextOptions,
    counted,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import note, say, show
from lyapunov_prune.errors import LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.budget.spent import Spent
    from lyapunov_prune.models.decoder import Decoder
    from lyapunov_prune.shrinking.texts import Texts

# For --size, where no option says another: of three windows two are for the gradients, and one decides.
_TEXT = TextOptions("builtin", 36 * 256, 256)
_ON_DISK = (
    "remove layers without healing: rank --device disk --criterion angular --remove N, then prune --device disk --plan "
    "FILE"
)
_JUDGED = 4096  # tokens that the file of --size is measured on, from the other half of the text


@dataclass(frozen=True)
class Goal:
    """How much is removed."""

    remove: Annotated[float | None, ABOVE_ZERO, what_option(help="Number or share of layers.", **counted)] = None
    max_kl: Annotated[
        float | None,
        ABOVE_ZERO,
        what_option("--max-kl", help="Instead: as many layers as possible with a KL below this, in nats per token."),
    ] = None
    max_drop: Annotated[
        str | None,
        what_option(
            metavar="TASK:DROP",
            help="Instead: as many layers as possible while a task's score falls by at most DROP, as gsm8k:0.02. TASK "
            "is a task of lm-evaluation-harness or a .jsonl file, as for eval --tasks; every second item is used to "
            "choose, the others to report. Prefer a task with generated answers, such as gsm8k: multiple choice hides "
            "losses in arithmetic.",
        ),
    ] = None
    size: Annotated[
        str | None,
        checks.SIZE,
        what_option(
            "--size",
            metavar="300MB|50%|4.5bpw",
            help="Instead: the best .gguf file, or folder for vLLM, of this size; no layer is removed. 300MB: of the "
            "weight files; 50%: a share of the matrices in 16 bits; 4.5bpw: bits a weight. Needs the extra engines, "
            "for a folder packed.",
        ),
    ] = None


def shrink(
    model: Model,
    *,
    goal: Goal = Goal(),
    minutes: Annotated[
        float | None, ABOVE_ZERO, what_option(help="Minutes for the whole run; default: 100 steps of healing.")
    ] = None,
    inputs: Inputs = Inputs(text="self", tokens=25600, context=256),
    judge: Judge = None,
    fail_above: FailAbove = None,
    output: FileTarget,
    given: Given = Given(),
) -> None:
    """Make a smaller model: the best one of a --size, or fewer layers, chosen, mended, healed and evaluated.

    --size keeps every layer and gives every matrix the type that its share of the loss deserves: a block type of
    llama.cpp if --output ends in .gguf, else integers of 4 or 8 bits, packed for vLLM and transformers.
    --remove, --max-kl and --max-drop remove layers and write a plain checkpoint; with an --output that ends in .gguf,
    MODEL's GGUF file is copied without them, and the report goes to runs/MODEL. Without a target several sizes (of a
    .gguf file) or numbers of layers (of a folder) are tried, and the smallest model is written that costs less than
    10 % more perplexity.

    Where layers are removed, the expected time and memory are printed first, and the model writes the text to learn
    from unless --text is given. Mending (a linear map, fitted without training, stands in for the removed layers) and
    healing (distilling from the dense model) are kept only if text that they were not fitted on shows that they help.
    If the run is interrupted, the same command continues.
    """
    if goal.size is not None or (output.suffix == ".gguf" and goal == Goal()):
        require_ratio(_write_sized(model, goal.size, inputs, output, given), fail_above)
        return
    if inputs.disk:
        raise LyapunovPruneError(f"shrink needs the model in memory; {_ON_DISK}")
    inputs.require_loaded("shrink", one_place=True)

    from lyapunov_prune.shrinking.target import Target as Wanted

    wanted = Wanted.of(goal.remove, goal.max_kl, goal.max_drop)

    from lyapunov_prune.data.sources import SELF
    from lyapunov_prune.evaluation.tasks import halves
    from lyapunov_prune.shrinking.report import REPORT
    from lyapunov_prune.shrinking.request import Request
    from lyapunov_prune.shrinking.shrink import carry_out
    from lyapunov_prune.shrinking.written import is_gguf, require_output

    require_output(model, output)
    report = begun_run(None, model, REPORT, "eval.json") if is_gguf(output) else output
    folder = jobs_folder()
    if inputs.text == SELF == judge:
        raise LyapunovPruneError(
            "the model writes the text to learn from, so it cannot also judge; give another text as --judge"
        )
    items = None if wanted.task is None else halves(wanted.task)
    if items is not None and not items[0].generates:
        note(
            f"{items[0].name} is multiple choice, which hides losses in arithmetic and free answers; a task with "
            "generated answers, such as gsm8k, shows them"
        )
    _require_fits(model, inputs)
    loaded = inputs.load(model)
    request = Request(
        loaded.model,
        loaded.tokenizer,
        wanted,
        _texts(loaded, inputs, judge),
        items=items,
        minutes=minutes,
        batch_size=windows_at_once(loaded, inputs.context),
        folder=folder,
        text=() if inputs.text == SELF else ("--text", inputs.text),
        judge=() if judge is None else ("--judge", judge),
        source=() if inputs.dtype is None else ("--dtype", inputs.dtype),
    )
    done = carry_out(request, output, lambda expected: note("\n".join(expected.answer())))
    if report != output:
        done.report.save(report / REPORT)
        done.report.evaluation.save(report / "eval.json")
    draw_report(report)
    for part in (*done.report.further(), done.report):
        show(part, output if part is done.report else None, kept=report / REPORT)
    say(f"Report: {report / 'report.html'}")
    require_ratio(done.report, fail_above)


def _write_sized(model: str, size: str | None, inputs: Inputs, output: Path, given: Given) -> Spent:
    """Write the best GGUF file or folder of `model` of this size; without one, of the smallest that costs little."""
    from lyapunov_prune.budget.spend import require_target, spend
    from lyapunov_prune.budget.spent import REPORT
    from lyapunov_prune.evaluation.judging import POWER, require_windows

    is_file = require_target(output)
    if not inputs.disk:
        inputs.require_loaded("choosing a type for every matrix", one_place=True)
    given.refuse(
        "has no effect on a size, for which every matrix gets a type; leave it out",
        *("remove", "max_kl", "max_drop", "minutes", "judge"),
    )
    run = begun_run(None, model, REPORT) if is_file else output
    unsaid = {field.name: getattr(_TEXT, field.name) for field in fields(_TEXT) if field.name not in given}
    inputs = replace(inputs, **unsaid)
    loaded, batch = load_inputs(model, inputs)
    require_windows(batch, 3 * POWER)
    judging = replace(inputs, tokens=_JUDGED, context=loaded.structure.at_most(512))
    judge, at = judging.batch(loaded, "evaluation"), len(batch) - len(batch) // 3
    batch, check = batch.take(range(at)), batch.take(range(at, len(batch)))
    done = spend(loaded, loaded.tokenizer, size, output, batch=batch, judge=judge, check=check)
    done.save(run / REPORT)
    show(done, output, kept=run / REPORT)
    for part in done.further():
        show(part, None, kept=run / REPORT)
    if not is_file:
        say(f"Run it: vllm serve {shlex.quote(str(output))}")
    return done


def _require_fits(model: str, inputs: Inputs) -> None:
    """Raise LyapunovPruneError for a model that is too large for the memory."""
    from lyapunov_prune.export.copied import too_large
    from lyapunov_prune.models.device import resolve_device

    if why := too_large(model, resolve_device(inputs.device)):
        raise LyapunovPruneError(f"shrink needs the model in memory ({why}); {_ON_DISK}")


def _texts(loaded: Decoder, inputs: Inputs, judge: str | None) -> Texts:
    """The texts that are named; the model writes the others."""
    from lyapunov_prune.data.sources import SELF
    from lyapunov_prune.shrinking.texts import Texts, wide_context

    learn = held_out = choose = second = None
    if inputs.text != SELF:
        learn = inputs.batch(loaded, "calibration")
        wide = loaded.structure.at_most(Inputs.context)
        held_out = inputs.as_eval(wide).batch(loaded, "evaluation")
        width = wide_context(loaded.structure, learn.tokens, learn.context)
        if width != learn.context:
            choose = replace(inputs, context=width).batch(loaded, "calibration")
    texts = Texts(learn, None, held_out, inputs.tokens, inputs.context, choose)
    if judge is not None and judge != SELF:
        texts.require(loaded.model)
        windows, width = texts.searched(loaded.model)
        second = load_beside(judge, loaded, windows // 2, replace(inputs, context=width))
    return replace(texts, judge=second)
