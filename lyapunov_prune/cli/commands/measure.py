"""Commands that measure a model and leave it as it is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyapunov_prune.cli import checks
from lyapunov_prune.cli.inputs import begun_run, draw_report, load_inputs, require_studies, run_folder, windows_at_once
from lyapunov_prune.cli.jobs import jobs_folder
from lyapunov_prune.cli.options import DISK, Inputs, Method, Model, RunOptions, Seeds, counted, one_of, what_option
from lyapunov_prune.cli.ranked import RankOptions
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import follow, note, say, show
from lyapunov_prune.ranking.table import require_ranks
from lyapunov_prune.sensitivity.table import STUDIES

if TYPE_CHECKING:
    from lyapunov_prune.ranking.ranking import Ranking


def profile(
    model: Model,
    *,
    seeds: Seeds = 4,
    epsilon: Annotated[float, what_option(help="Relative size of the perturbation.")] = 1e-2,
    inputs: RunOptions = RunOptions(),
) -> None:
    """Measure the contraction and Block Influence of every layer; writes profile.json and figures."""
    from lyapunov_prune.profiles.profile import kept_profile

    run = begun_run(inputs.output, model, "profile.json")
    loaded, batch = load_inputs(model, inputs)
    batch_size = windows_at_once(loaded, inputs.context)
    drawn, path = range(seeds), run / "profile.json"
    before = path.stat().st_mtime_ns if path.exists() else None
    result = kept_profile(
        path,
        loaded,
        batch,
        how={"epsilon": epsilon, "method": "difference", "pooling": "energy"},
        seeds=drawn,
        batch_size=batch_size,
    )
    if path.stat().st_mtime_ns == before:
        note(f"{path} holds this measurement already, of the same model, text and options; delete it to measure again")
    draw_report(run)
    show(result, path)


def rank(
    model: Annotated[str, checks.MEASURED, typer.Argument(help="A model, as for profile, or the profile.json of one.")],
    *,
    remove: Annotated[
        float | None,
        what_option(help="Write plan.json for this number or share of layers (or experts per layer).", **counted),
    ] = None,
    by: RankOptions = RankOptions(),
    inputs: RunOptions = RunOptions(),
    given: Given = Given(),
) -> None:
    """Rank the layers, or parts of them, for removal; with --remove writes plan.json."""
    profile_file = Path(model) if model.endswith(".json") else None
    by = by.settled(None if inputs.disk or profile_file is not None else remove)
    by.require(given)
    require_ranks(by.goes_by, by.what, remove=remove, streamed=inputs.disk, profiled=profile_file is not None)
    if profile_file is not None:
        measured_already = f"applies to a model, and {profile_file} was measured already; leave it out"
        given.refuse_record(measured_already, Inputs)

    from lyapunov_prune.profiles.profile import LayerProfile
    from lyapunov_prune.ranking.measured import rank_layers
    from lyapunov_prune.ranking.rank import rank as measured_rank
    from lyapunov_prune.results.files import require_writable

    ranking: Ranking
    if profile_file is not None:
        measured = LayerProfile.load(profile_file)
        run = inputs.output or profile_file.parent
        require_writable(run)
        ranking = rank_layers(measured.contraction, measured.influence, criterion=by.goes_by, protect=by.protected())
    else:
        run = run_folder(inputs.output, model)
        require_writable(run)
        loaded, batch = load_inputs(model, inputs)
        batch_size = windows_at_once(loaded, inputs.context)
        places: dict[str, Any] = {"folder": run, "jobs": jobs_folder()}
        ranking = measured_rank(loaded, batch, **by.how, **places, remove=remove, batch_size=batch_size)
    plan = None
    if remove is not None:
        plan = ranking.plan(remove)
        say(f"{plan.sentence()}.")
        show(ranking, plan.save(run / "plan.json"))
        if stability := plan.stability():
            say(stability)
    else:
        whole = run / f"{by.goes_by}.json"
        show(ranking, None, kept=whole if whole.is_file() else None)
    if plan is not None:
        device = f" --device {DISK}" if inputs.disk else ""  # the model may not fit in memory
        planned = shlex.quote(str(run / "plan.json"))
        follow(f"prune {shlex.quote(plan.model.name)} --plan {planned} -o smaller{device}")


def sensitivity(
    model: Model,
    *,
    study: Annotated[
        str,
        what_option(
            autocompletion=lambda: ["all", *STUDIES],
            **one_of(STUDIES, "What is changed: all, or a list of these separated by commas."),
        ),
    ] = "group,layer,removal",
    method: Method = "magnitude",
    sparsity: Annotated[float, what_option(help="Share to remove, of entries or (low rank) of parameters.")] = 0.5,
    bits: Annotated[float | None, what_option(help="Bits per weight, for methods that round; default: 4.")] = None,
    inputs: RunOptions = RunOptions(tokens=1024, context=256),
    given: Given = Given(),
) -> None:
    """Change one thing at a time and measure the loss: which matrices and layers are sensitive.

    Writes sensitivity.json and a heat map, and the profile to compare with as sensitivity/profile.json. If the run is
    interrupted, the same command continues. Under `accelerate launch -m lyapunov_prune.cli` the processes share the
    work.
    """
    from lyapunov_prune.sensitivity.changes import Compression

    inputs.require_loaded("sensitivity")
    studies = require_studies(study)
    how: dict[str, Any] = {"method": method, "sparsity": sparsity, "bits": bits}
    base = Compression(**how, rank=None)  # refused before anything is loaded
    for setting, option in (("method", "method"), ("amount", "sparsity"), ("amount", "bits")):
        if not any(setting in STUDIES[name].takes for name in studies):
            given.refuse(f"has no effect on {' and '.join(studies)}; leave it out", option)
    if base.rounds:
        given.refuse(f"has no effect on --method {method}; give --bits", "sparsity")

    from lyapunov_prune.models.launched import processes_of
    from lyapunov_prune.profiles.profile import kept_profile
    from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity

    run = begun_run(inputs.output, model, "sensitivity.json", "sensitivity/profile.json")
    loaded, calibration = load_inputs(model, inputs)
    batch = inputs.batch(loaded, "evaluation")
    batch_size = windows_at_once(loaded, inputs.context)
    processes_of(loaded.model)  # of two models nothing is kept
    # run/profile.json is of `profile`, and as a rule by more tokens and seeds.
    beside = run / "sensitivity" / "profile.json"
    profile = kept_profile(beside, loaded.model, calibration, batch_size=batch_size)
    result = measure_sensitivity(
        loaded.model,
        batch,
        studies=studies,
        **how,
        calibration=calibration,
        profile=profile,
        folder=jobs_folder(),
        batch_size=batch_size,
    )
    result.save(run / "sensitivity.json")
    draw_report(run)
    show(result, run / "sensitivity.json")
