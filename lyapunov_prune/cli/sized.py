"""`--size` of `shrink` and `compress`: the best GGUF file of so many bytes."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from lyapunov_prune.cli.inputs import begun_run, load_inputs
from lyapunov_prune.cli.options import Inputs, TextOptions
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import say, show

_TEXT = TextOptions("builtin", 24 * 256, 256)  # of the gradients, where no option says another
_JUDGED = 4096  # tokens that the result is measured on, from the other half of the text


def write_sized(model: str, size: str, inputs: Inputs, output: Path, given: Given, *refused: str) -> None:
    """Write `model` to the GGUF file `output` at `size`; the options `refused` have no effect on that."""
    from lyapunov_prune.budget.spend import spend
    from lyapunov_prune.budget.spent import REPORT
    from lyapunov_prune.export.gguf import require_file

    inputs.require_loaded("--size", one_place=True)
    given.refuse("has no effect with --size, which chooses a type for every matrix; leave it out", *refused)
    require_file(output)
    run = begun_run(None, model, REPORT)
    unsaid = {field.name: getattr(_TEXT, field.name) for field in fields(_TEXT) if field.name not in given}
    inputs = replace(inputs, **unsaid)
    loaded, batch = load_inputs(model, inputs)
    judging = replace(inputs, tokens=_JUDGED, context=loaded.structure.at_most(512))
    judge = judging.batch(loaded, "evaluation")
    done = spend(loaded, loaded.tokenizer, size, output, batch=batch, judge=judge)
    done.save(run / REPORT)
    for part in (done, *done.further()):
        show(part, None, kept=run / REPORT)
    say(f"Written: {output}")
