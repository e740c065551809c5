"""Commands that measure a model and leave it as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lyapunov_prune.cli import choices
from lyapunov_prune.cli.inputs import (
    begun_run,
    draw_report,
    explain,
    explain_drift,
    load_inputs,
    require_studies,
    run_folder,
    windows_at_once,
)
from lyapunov_prune.cli.options import (
    IN_MEMORY,
    Json,
    MaxKL,
    Method,
    Model,
    ModelOptions,
    Output,
    RankOptions,
    Resume,
    Seeds,
    Stack,
    Stream,
    TextOptions,
    counted,
    one_of,
    what_option,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import Parts, say, show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.ranking.table import CRITERIA, require_ranks
from lyapunov_prune.sensitivity.table import STUDIES

if TYPE_CHECKING:
    from lyapunov_prune.ranking.ranking import Ranking


def profile(
    model: Model,
    *,
    along: Annotated[
        choices.Along,
        what_option(help="Follow errors from layer to layer, or from token to token in recurrent states."),
    ] = "depth",
    seeds: Seeds = 4,
    epsilon: Annotated[float, what_option(help="Relative size of the perturbation.")] = 1e-2,
    derivative: Annotated[
        choices.Derivative, what_option(help="Follow a finite difference, or the forward-mode derivative.")
    ] = "difference",
    by_sublayer: Annotated[
        bool, what_option("--by-sublayer", help="Also the growth through attention and MLP: sublayer-growth.json.")
    ] = False,
    stack: Stack = None,
    stream: Stream = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Measure contraction and Block Influence of every layer; writes profile.json and figures.

    With --along time instead how much of an error in the recurrent state of each layer is left 1 to 64 tokens later,
    for models with state-space, linear-attention or convolution layers; writes persistence.json and figures.
    """
    if along == "time":
        given.refuse("has no effect with --along time; leave it out", "derivative", "by_sublayer", "stack")
        given.refuse("reads layers from files, and --along time needs them in memory; leave it out", "stream")

        from lyapunov_prune.profiles.persistence import measure_persistence

        run = begun_run(output, model, "persistence.json")
        loaded, batch = load_inputs(model, source, text)
        at_once = windows_at_once(loaded, text.context)
        found = measure_persistence(loaded.model, batch, epsilon=epsilon, seeds=range(seeds), batch_size=at_once)
        written = found.save(run / "persistence.json")
        draw_report(run)
        show(found, as_json, written)
        return
    if stream:
        given.refuse(IN_MEMORY, "by_sublayer", "stack")

    from lyapunov_prune.profiles.profile import kept_profile
    from lyapunov_prune.profiles.sublayer_growth import sublayer_growth

    run = begun_run(output, model, "profile.json", *(["sublayer-growth.json"] if by_sublayer else []))
    loaded, batch = load_inputs(model, source, text, stream=stream, stack=stack)
    batch_size = windows_at_once(loaded, text.context)
    drawn = range(seeds)
    growth = None
    if by_sublayer:  # first: not every family has branches to tell apart
        growth = sublayer_growth(loaded, batch, epsilon=epsilon, seeds=drawn, batch_size=batch_size)
    result = kept_profile(
        run / "profile.json",
        loaded,
        batch,
        how={"epsilon": epsilon, "method": derivative, "pooling": "energy"},
        seeds=drawn,
        batch_size=batch_size,
        resume=False,
    )
    if growth is None:
        draw_report(run)
        show(result, as_json, run / "profile.json")
    else:
        parts = Parts(run, as_json)
        parts.add("profile", result)
        parts.add("sublayer-growth", growth)
        draw_report(run)
        parts.end()


def rank(
    model: Annotated[str | None, typer.Argument(help="As for profile; not needed with --profile.")] = None,
    *,
    profile_file: Annotated[Path | None, what_option("--profile", help="A profile.json to rank by.")] = None,
    remove: Annotated[
        float | None, what_option(help="Write plan.json for so many layers (or experts of each).", **counted)
    ] = None,
    max_kl: MaxKL = None,
    by: RankOptions = RankOptions(),
    stack: Stack = None,
    stream: Stream = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    resume: Resume = False,
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Order the layers, or their attention or MLP, for removal; with --remove N or --max-kl X writes plan.json."""
    if (model is None) == (profile_file is None):
        raise LyapunovPruneError("give a MODEL to measure or --profile FILE, one of the two")
    by = by.settled(None if stream or profile_file is not None else remove)
    by.require(given)
    require_ranks(by.goes_by, by.what, remove=remove, streamed=stream, profiled=profile_file is not None)
    if max_kl is not None:
        given.refuse("does not go with --max-kl; give one of the two", "remove", "profile_file")
    if not CRITERIA[by.goes_by].resumes:
        given.refuse(f"has no effect on --criterion {by.goes_by}; leave it out", "resume")
    if profile_file is not None:
        measured_already = "is of a MODEL to measure, which --profile FILE was; leave it out"
        given.refuse(measured_already, "resume", "stream", "stack")
        given.refuse_record(measured_already, ModelOptions)
        given.refuse_record(measured_already, TextOptions)
    if stream:
        given.refuse(IN_MEMORY, "max_kl", "stack")

    from lyapunov_prune.profiles.profile import LayerProfile
    from lyapunov_prune.ranking.budget import remove_under_budget
    from lyapunov_prune.ranking.measured import rank_layers
    from lyapunov_prune.ranking.ranking import LayerRanking
    from lyapunov_prune.ranking.within import most_within
    from lyapunov_prune.results.files import require_writable

    ranking: Ranking
    if profile_file is not None:
        measured = LayerProfile.load(profile_file)
        run = output or profile_file.parent
        require_writable(run)
        ranking = rank_layers(
            measured.contraction,
            measured.influence,
            criterion=by.goes_by,
            protect=by.protected(),
        )
    else:
        assert model is not None
        run = run_folder(output, model)
        require_writable(run)
        loaded, batch = load_inputs(model, source, text, stream=stream, stack=stack)
        by = by.of_model(loaded, given)
        batch_size = windows_at_once(loaded, text.context)
        if max_kl is not None and by.what == "experts":
            weighed = most_within(loaded, batch, by.what, max_kl, criterion=by.goes_by, batch_size=batch_size)
            kept = weighed.save(run / "weighed.json")
            show(weighed, as_json, weighed.plan().save(run / "plan.json"), kept=kept)
            return
        ranking = by.rank(loaded, batch, remove, batch_size, folder=run, resume=resume)
    plan = written = None
    if remove is not None:
        plan = ranking.plan(remove)
        written = plan.save(run / "plan.json")
    if max_kl is not None:
        assert isinstance(ranking, LayerRanking)  # the others ask for --remove
        spent = remove_under_budget(loaded, batch, ranking, max_kl, batch_size=batch_size)
        spent.save(run / "budget.json")
        written = spent.plan().save(run / "plan.json")
        show(spent, as_json, written, kept=run / "budget.json")
        return
    show(ranking, as_json, None)
    if plan is not None and not as_json:
        say("\n".join(filter(None, (f"Written: {written}", plan.stability()))))


def check(
    model: Model,
    compressed: Annotated[
        str | None, typer.Argument(help="Made from MODEL by anything that changed its matrices alone.")
    ] = None,
    *,
    bits: Annotated[
        int | None, what_option(min=2, max=8, help="Round every matrix to this many bits (rtn), and follow that.")
    ] = None,
    engines: Annotated[
        bool, what_option("--engines", help="Only hold the config against known short cuts of serving engines.")
    ] = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(tokens=512, context=128),
    resume: Resume = False,
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Approximate every matrix and check its bound on every forward; writes bounds.json.

    With COMPRESSED its matrices are the approximations, on the inputs that they are given in its own forward; with
    --bits those of MODEL rounded, in the same way; with neither thirty settings of sparsity, rank and cache radius.
    With --engines no weight is read: the layers of the checkpoint are held against what vLLM, SGLang, llama.cpp and
    others are known to make of them. Exit code 1 on a violation, and where an engine would go wrong.
    """
    if engines:
        alone = "is of bounds, and --engines reads the config alone; leave it out"
        given.refuse(alone, "compressed", "bits", "resume", "output")
        given.refuse_record(alone, ModelOptions)
        given.refuse_record(alone, TextOptions)
        _check_engines(model, as_json)
        return

    from lyapunov_prune.bounds.check import check_grid, check_written
    from lyapunov_prune.compression.compress import compress
    from lyapunov_prune.forward.reading import read
    from lyapunov_prune.models.tokenizers import require_same_ids

    if compressed is not None:
        given.refuse("rounds the matrices of MODEL, and COMPRESSED has its own; leave out one of them", "bits")
    if compressed is not None or bits is not None:
        given.refuse("goes on with a check of thirty settings, and this is one; leave it out", "resume")
    run = begun_run(output, model, "bounds.json")
    loaded, batch = load_inputs(model, source, text)
    if compressed is not None:
        other = source.load(compressed)
        reading = read(loaded, batch)
        require_same_ids(loaded.tokenizer, other.tokenizer, (model, compressed), reading.scorer.vocabulary)
        result = check_written(loaded, other.model, reading)
    elif bits is not None:
        rounded = compress(loaded.model, method="rtn", bits=bits)
        result = check_written(loaded.model, rounded.model, batch, method=f"rtn, {bits} bits")
    else:
        result = check_grid(loaded.model, batch, folder=run / "jobs" / "check", resume=resume)
    written = result.save(run / "bounds.json")
    draw_report(run)
    show(result, as_json, written)
    if not result.passed:
        raise CheckFailed(f"{len(result.violations)} bounds are violated; see {written}")


def _check_engines(model: str, as_json: bool) -> None:
    from lyapunov_prune.models.engines import check_engines

    found = check_engines(model)
    if found.passed and not as_json:
        say(f"{found.headline()}.")
        return
    show(found, as_json, None)
    if not found.passed:
        raise CheckFailed(f"{len(found.findings)} short cuts of engines meet {model}; compare outputs there before use")


def sensitivity(
    model: Model,
    *,
    study: Annotated[
        str,
        what_option(
            autocompletion=lambda: ["all", *STUDIES],
            help=one_of(STUDIES, "What is changed: all, or some of these with commas between."),
        ),
    ] = "group,layer,removal",
    method: Method = "magnitude",
    sparsity: Annotated[float, what_option(help="Share of entries removed, or of parameters by low rank.")] = 0.5,
    bits: Annotated[float | None, what_option(help="Bits a weight, of a method that rounds; 4 if not given.")] = None,
    why: Annotated[
        bool, what_option("--why", help="Also what may explain it: rank, tails, sparsity, Jacobian norms, drift by A.")
    ] = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(tokens=1024, context=256),
    resume: Resume = False,
    output: Output = None,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Change one thing at a time and measure the loss: which matrices and layers can bear it.

    Writes sensitivity.json and a heat map, the profile that it is compared with as sensitivity/profile.json, with
    --why activations.json and jacobian.json, and of the study group drift.json. Interrupted, it goes on with --resume;
    under `accelerate launch -m lyapunov_prune.cli` the processes share the work.
    """
    from lyapunov_prune.models.launched import processes_of
    from lyapunov_prune.profiles.profile import kept_profile
    from lyapunov_prune.sensitivity.changes import Compression
    from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity

    studies = require_studies(study)
    base = Compression(method, sparsity, None, bits)  # refused before anything is loaded
    for setting, option in (("method", "method"), ("amount", "sparsity"), ("amount", "bits")):
        if not any(setting in STUDIES[name].takes for name in studies):
            given.refuse(f"has no effect on {' and '.join(studies)}; leave it out", option)
    if base.rounds:
        given.refuse(f"has no effect on --method {method}; give --bits", "sparsity")
    explained = ["activations.json", "jacobian.json", *(["drift.json"] if "group" in studies else [])] if why else []
    run = begun_run(output, model, "sensitivity.json", "sensitivity/profile.json", *explained)
    loaded, calibration = load_inputs(model, source, text)
    batch = text.load(loaded, "evaluation")
    batch_size = windows_at_once(loaded, text.context)
    processes_of(loaded.model)  # of two models nothing is kept
    # run/profile.json is of `profile`, and as a rule by more tokens and seeds.
    beside = run / "sensitivity" / "profile.json"
    profile = kept_profile(beside, loaded.model, calibration, batch_size=batch_size, resume=resume)
    result = measure_sensitivity(
        loaded.model,
        batch,
        studies=studies,
        method=method,
        sparsity=sparsity,
        bits=bits,
        calibration=calibration,
        profile=profile,
        folder=run / "jobs" / "sensitivity",
        resume=resume,
        batch_size=batch_size,
    )
    result.save(run / "sensitivity.json")
    if why:
        explain(run, loaded, calibration, batch_size, resume)
        if "group" in studies:
            explain_drift(run, result, profile.contraction)
    draw_report(run)
    show(result, as_json, run / "sensitivity.json")
