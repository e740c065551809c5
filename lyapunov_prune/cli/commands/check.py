"""The command that checks error bounds, or compares a config with what engines assume."""

from __future__ import annotations

from typing import Annotated

import typer

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, conclude, load_inputs, require_bounds
from lyapunov_prune.cli.jobs import jobs_folder
from lyapunov_prune.cli.options import Model, RunOptions, what_option
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.errors import CheckFailed

Engines = Annotated[
    bool, what_option("--engines", help="Only compare the config with known assumptions of inference engines.")
]


def check(
    model: Model,
    compressed: Annotated[
        str | None, checks.MODEL, typer.Argument(help="A model made from MODEL by changing only its matrices.")
    ] = None,
    *,
    engines: Engines = False,
    inputs: RunOptions = RunOptions(tokens=512, context=128),
    given: Given = Given(),
) -> None:
    """Approximate every matrix and check its error bound in every forward pass; writes bounds.json.

    With COMPRESSED its matrices are the approximations, on the inputs that they get in its own forward; without it,
    thirty settings of sparsity, rank and cache radius are checked. --engines reads no weights: it compares the layers
    of the checkpoint with what vLLM, SGLang, llama.cpp and others are known to do with them. The exit code is 1 if a
    bound is violated or an engine would be wrong.
    """
    if engines:
        alone = "applies to bounds, and --engines reads the config alone; leave it out"
        given.refuse(alone, "compressed")
        given.refuse_record(alone, RunOptions)
        _check_engines(model)
        return

    inputs.require_loaded("check")

    from lyapunov_prune.bounds.check import check_grid, check_written
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.tokenizers import require_same_ids

    run = begun_run(inputs.output, model, "bounds.json")
    loaded, batch = load_inputs(model, inputs)
    if compressed is not None:
        other = inputs.load(compressed)
        reading = read(loaded, batch)
        require_same_ids(loaded.tokenizer, other.tokenizer, (model, compressed), reading.scorer.vocabulary)
        result = check_written(loaded, other.model, reading)
    else:
        result = check_grid(loaded.model, batch, folder=jobs_folder())
    written = conclude(run, "bounds.json", result)
    require_bounds(result.passed, len(result.violations), written)


def _check_engines(model: str) -> None:
    from lyapunov_prune.models.engines import check_engines

    found = check_engines(model)
    if found.passed:
        say(f"{found.headline()}.")
        return
    show(found, None)
    raise CheckFailed(
        f"{model} violates {len(found.findings)} engine assumptions; compare outputs there before using it"
    )
