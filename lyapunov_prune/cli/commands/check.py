"""The command that says what is wrong with a file, or checks error bounds."""

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

Bounds = Annotated[
    bool, what_option("--bounds", help="Check error bounds on a text, with every matrix approximated in thirty ways.")
]


def check(
    model: Model,
    compressed: Annotated[
        str | None,
        checks.MODEL,
        typer.Argument(
            help="A model made from MODEL by changing only its matrices: checks the bounds of their errors."
        ),
    ] = None,
    *,
    bounds: Bounds = False,
    inputs: RunOptions = RunOptions(tokens=512, context=128),
    given: Given = Given(),
) -> None:
    """Say what is wrong with the file of MODEL, from one pass over its bytes: no forward, however large it is.

    Looks for tensors that are missing, broken, constant, doubled or shifted, for shapes and names that config or header
    deny, for an index, tokenizer or chat template that does not fit; also says what engines would do wrong with its
    layers. The exit code is 1 if something is wrong with the file.

    With COMPRESSED or --bounds, checks the error bound of every matrix in every forward instead and writes bounds.json:
    with COMPRESSED its matrices are the approximations, on the inputs that they get in its own forward; with --bounds
    thirty settings of sparsity, rank and cache radius are checked. The exit code is 1 if a bound is violated.
    """
    if compressed is None and not bounds:
        given.refuse_record("applies to bounds; give --bounds too, or a COMPRESSED", RunOptions)
        _check_file(model)
        return

    inputs.require_loaded("check")

    from lyapunov_prune.bounds.check import check_grid, check_written
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.tokenizers import require_same_ids

    run = begun_run(inputs.output, model, "bounds.json")
    loaded, batch = load_inputs(model, inputs)
    if compressed is not None:
        given.refuse("checks thirty settings of MODEL; leave it out, or COMPRESSED", "bounds")
        other = inputs.load(compressed)
        reading = read(loaded, batch)
        require_same_ids(loaded.tokenizer, other.tokenizer, (model, compressed), reading.scorer.vocabulary)
        result = check_written(loaded, other.model, reading)
    else:
        result = check_grid(loaded.model, batch, folder=jobs_folder())
    written = conclude(run, "bounds.json", result)
    require_bounds(result.passed, len(result.violations), written)


def _check_file(model: str) -> None:
    from lyapunov_prune.diagnosis.check_file import check_file

    found = check_file(model)
    if found.passed and not found.engines:
        say(found.headline())
    else:
        show(found, None)
    if not found.passed:
        raise CheckFailed(f"{model} is broken; what to do stands beside each fault")
