"""The command that says where the error of a compressed checkpoint comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, conclude, load_inputs, require_bounds, windows_at_once
from lyapunov_prune.cli.options import Model, RunOptions
from lyapunov_prune.cli.terminal import note, show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError

if TYPE_CHECKING:  # a usage error must not wait for torch
    from lyapunov_prune.models.decoder import Decoder


def explain(
    dense: Model,
    compressed: Annotated[
        str,
        checks.MODEL,
        typer.Argument(help="A model made from DENSE: packed, GGUF, sparse, rounded, pruned, mended, healed."),
    ],
    *,
    inputs: RunOptions = RunOptions(tokens=2048, context=256),
) -> None:
    """Show what is broken in COMPRESSED, and where its error comes from: what each layer inherits, adds and amplifies.

    A tensor, setting or tokenizer that differs from DENSE by more than rounding is named first. Also shows what each
    layer costs at the prediction (KL and perplexity with only this layer compressed, and with all others compressed),
    and for the layers that cost most every matrix with its certified bound. Removed layers are read from the provenance
    of the checkpoint. If the folder of the run has a profile.json, its rho is shown beside. Writes explanation.json.
    The exit code is 1 if COMPRESSED is too broken to load, the parts do not add up, or a bound is violated.
    """
    from lyapunov_prune.data.unseen import require_unseen
    from lyapunov_prune.diagnosis.diagnose import diagnose
    from lyapunov_prune.explaining.explain import explain as measured
    from lyapunov_prune.explaining.explain import told_cost
    from lyapunov_prune.explaining.explanation import EXPLANATION
    from lyapunov_prune.explaining.pair import kept_layers
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.tokenizers import require_same_ids
    from lyapunov_prune.profiles.profile import LayerProfile

    run = begun_run(inputs.output, dense, EXPLANATION)
    profile = run / "profile.json"
    known = LayerProfile.load(profile).contraction if profile.is_file() else None
    loaded, batch = load_inputs(dense, inputs, "evaluation")
    other = _loaded(inputs, compressed)
    for model in (loaded.model, other.model):
        require_unseen(model, batch)
    reading = read(loaded, batch)
    kept = kept_layers(loaded, other)
    diagnosis = diagnose(loaded, other, reading, kept=kept)
    at_once = windows_at_once(loaded, inputs.context)
    try:
        require_same_ids(loaded.tokenizer, other.tokenizer, (dense, compressed), reading.scorer.vocabulary)
        note(told_cost(reading))
        result = measured(
            loaded, other, reading, profile=known, batch_size=at_once, folder=run, kept=kept, diagnosis=diagnosis
        )
    except LyapunovPruneError:  # what is broken may be why the two cannot be compared
        if diagnosis.findings:
            show(diagnosis, None)
        raise
    written = conclude(run, EXPLANATION, result)
    for part in result.further():
        show(part, None, kept=written)
    if not result.adds_up:
        raise CheckFailed(f"the parts of the error do not add up; see {written}")
    violated = 0 if result.matrices is None else len(result.matrices.violations)
    require_bounds(not violated, violated, written)


def _loaded(inputs: RunOptions, name: str) -> Decoder:
    """The model `name`; what is wrong with its file, if that is why it does not load."""
    try:
        return inputs.load(name)
    except LyapunovPruneError:
        from lyapunov_prune.diagnosis.check_file import check_file

        found = check_file(name)
        if found.passed:
            raise
        show(found, None)
        raise CheckFailed(f"{name} does not load; what to do stands beside each of its faults") from None
