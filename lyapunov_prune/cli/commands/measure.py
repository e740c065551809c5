"""Commands that measure a model and leave it as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lyapunov_prune.cli.inputs import (
    MEASURED_CRITERIA,
    draw_report,
    explain,
    load_batch,
    load_inputs,
    measure_ranking,
    profile_model,
    require_budget,
    require_count,
    require_criterion,
    require_known_count,
    require_studies,
    require_what,
    run_folder,
)
from lyapunov_prune.cli.options import (
    Alpha,
    BatchSize,
    Bos,
    Context,
    Criterion,
    Device,
    DType,
    Epsilon,
    Json,
    MaxKL,
    Method,
    Model,
    Offline,
    Output,
    Pooling,
    Resume,
    Seed,
    Seeds,
    Text,
    Tokens,
    What,
)
from lyapunov_prune.cli.terminal import show
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError

if TYPE_CHECKING:
    from lyapunov_prune.ranking.angular import AngularDistance
    from lyapunov_prune.ranking.oracle import GreedyRemoval
    from lyapunov_prune.ranking.ranking import LayerRanking


def profile(
    model: Model,
    text: Text = "builtin",
    tokens: Tokens = 4096,
    context: Context = 512,
    batch_size: BatchSize = 1,
    seeds: Seeds = 4,
    seed: Seed = 0,
    epsilon: Epsilon = 1e-2,
    method: Method = "difference",
    pooling: Pooling = "energy",
    device: Device = "cpu",
    dtype: DType = None,
    bos: Bos = None,
    offline: Offline = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure contraction and Block Influence of every layer; writes profile.json and figures."""
    loaded, batch = load_inputs(model, text, tokens, context, device, dtype, bos, offline)
    result = profile_model(loaded, batch, batch_size, seeds, seed, epsilon, method, pooling)
    run = run_folder(output, model)
    result.save(run / "profile.json")
    draw_report(run)
    show(result, as_json, run / "profile.json")


def rank(
    model: Annotated[str | None, typer.Argument(help="As for profile; not needed with --profile.")] = None,
    profile_file: Annotated[Path | None, typer.Option("--profile", help="A profile.json to rank by.")] = None,
    remove: Annotated[int | None, typer.Option(help="Write plan.json for so many layers.")] = None,
    max_kl: MaxKL = None,
    what: What = "layers",
    criterion: Criterion = "blend",
    alpha: Alpha = 0.5,
    text: Text = "builtin",
    tokens: Tokens = 4096,
    context: Context = 512,
    batch_size: BatchSize = 1,
    seeds: Seeds = 4,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: DType = None,
    bos: Bos = None,
    offline: Offline = False,
    resume: Resume = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Order the layers, or their attention or MLP, for removal; with --remove N or --max-kl X writes plan.json."""
    from lyapunov_prune.profiles.profile import LayerProfile
    from lyapunov_prune.ranking.budget import remove_under_budget
    from lyapunov_prune.ranking.ranking import LayerRanking, rank_layers

    if (model is None) == (profile_file is None):
        raise LyapunovPruneError("give a MODEL to measure or --profile FILE, one of the two")
    require_criterion(criterion, alpha)
    require_what(what, criterion)
    require_known_count(criterion, remove)
    if max_kl is not None:
        require_budget(max_kl, what, remove is not None or profile_file is not None)
    if profile_file is not None:
        if what != "layers" or criterion in MEASURED_CRITERIA:
            missing = what if what != "layers" else f"criterion {criterion}"
            raise LyapunovPruneError(f"a profile holds no scores of {missing}; give a MODEL to measure")
        measured = LayerProfile.load(profile_file)
        ranking: LayerRanking | GreedyRemoval | AngularDistance
        run = output or profile_file.parent
        ranking = rank_layers(measured.contraction, measured.influence, criterion=criterion, alpha=alpha, seed=seed)
    else:
        assert model is not None
        loaded, batch = load_inputs(model, text, tokens, context, device, dtype, bos, offline)
        if remove is not None:
            require_count(remove, loaded.structure.num_layers, what)
        run = run_folder(output, model)
        ranking = measure_ranking(
            loaded, batch, what, criterion, alpha, remove, batch_size, seeds, seed, run=run, resume=resume
        )
    written = None
    if remove is not None:
        written = ranking.plan(remove).save(run / "plan.json")
    if max_kl is not None:
        assert isinstance(ranking, LayerRanking)  # the others ask for --remove
        spent = remove_under_budget(loaded.model, batch, ranking, max_kl, batch_size=batch_size)
        spent.save(run / "budget.json")
        written = spent.plan().save(run / "plan.json")
        show(spent, as_json, written)
        return
    show(ranking, as_json, written)


def evaluate(
    model: Model,
    against: Annotated[
        str | None, typer.Option(help="A reference model, measured in the same run (the dense one).")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure prefill and decoding speed too.")] = False,
    tasks: Annotated[
        str | None, typer.Option(help="Score tasks too: .jsonl files, names of lm-evaluation-harness (piqa,arc_easy).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many items of a task; all if not given.")] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Examples before an item: the first of the file. None, or the task's own.")
    ] = None,
    text: Text = "builtin",
    split: Annotated[str, typer.Option(help="evaluation, all, or calibration.")] = "evaluation",
    tokens: Tokens = 4096,
    context: Context = 512,
    batch_size: BatchSize = 1,
    device: Device = "cpu",
    dtype: DType = None,
    bos: Bos = None,
    offline: Offline = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Perplexity, and on request speed and tasks; writes eval.json."""
    from lyapunov_prune.data.text import require_unseen
    from lyapunov_prune.evaluation.evaluation import Evaluation, zero_share
    from lyapunov_prune.evaluation.perplexity import perplexity
    from lyapunov_prune.evaluation.speed import measure_speed
    from lyapunov_prune.evaluation.tasks import evaluate_tasks, load_tasks
    from lyapunov_prune.models.loading import load
    from lyapunov_prune.models.tokenizers import require_same_tokenizer

    if tasks is None and (limit is not None or few_shot is not None):
        raise LyapunovPruneError("--limit and --few-shot are of tasks; give --tasks with them")
    names = [against, model] if against else [model]
    chosen = load_tasks(tasks.split(","), few_shot=few_shot, offline=offline) if tasks is not None else None
    first, batch = load_inputs(names[0], text, tokens, context, device, dtype, bos, offline, split)
    prompt = min(256, (first.structure.max_context or 512) // 2)
    models = {names[0]: first.model}
    for name in names[1:]:
        other = load(name, dtype=dtype, device=device, offline=offline)
        require_same_tokenizer(first.tokenizer, other.tokenizer, (names[0], name))
        models[name] = other.model
    for found in models.values():
        require_unseen(found, batch)
    result = Evaluation(
        perplexities=tuple(perplexity(m, batch, batch_size=batch_size) for m in models.values()),
        zeros=tuple(zero_share(m) for m in models.values()),
        speed=measure_speed(models, prompt=prompt) if speed else None,
        tasks=evaluate_tasks(models, first.tokenizer, chosen, limit=limit, bos=bos, batch_size=batch_size)
        if chosen
        else None,
    )
    run = run_folder(output, model)
    result.save(run / "eval.json")
    draw_report(run)
    show(result, as_json, run / "eval.json")
    for part in (result.speed, result.tasks):
        if part and not as_json:
            show(part, as_json, None)


def check(
    model: Model,
    sparsity: Annotated[float | None, typer.Option(help="Share of entries removed by magnitude.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank kept of what is left.")] = None,
    cache_radius: Annotated[float | None, typer.Option(help="Radius of an input cache, as a share of ‖x‖.")] = None,
    text: Text = "builtin",
    tokens: Tokens = 512,
    context: Context = 128,
    batch_size: BatchSize = 1,
    device: Device = "cpu",
    dtype: DType = None,
    bos: Bos = None,
    offline: Offline = False,
    resume: Resume = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Approximate every matrix and check its bound on every forward; writes bounds.json.

    Thirty settings of sparsity, rank and cache radius, or the one given. Exit code 1 on a violation.
    """
    from lyapunov_prune.bounds.check import check_bounds, check_grid

    run = run_folder(output, model)
    loaded, batch = load_inputs(model, text, tokens, context, device, dtype, bos, offline)
    if sparsity is None and rank is None and cache_radius is None:
        jobs = run / "jobs" / "check"
        result = check_grid(loaded.model, batch, batch_size=batch_size, folder=jobs, resume=resume)
    else:
        result = check_bounds(
            loaded.model,
            batch,
            sparsity=sparsity or 0.0,
            rank=rank,
            cache_radius=cache_radius or 0.0,
            batch_size=batch_size,
        )
    written = result.save(run / "bounds.json")
    draw_report(run)
    show(result, as_json, written)
    if not result.passed:
        raise CheckFailed(f"{len(result.violations)} bounds are violated; see {written}")


def sensitivity(
    model: Model,
    study: Annotated[
        str,
        typer.Option(
            help="all, or some of matrix, group, layer, component, forward, backward, sparsity, rank, layer0, cliff, "
            "greedy, threshold, removal."
        ),
    ] = "group,layer,removal",
    method: Annotated[str, typer.Option(help="magnitude, weight-only or wanda.")] = "magnitude",
    sparsity: Annotated[float, typer.Option(help="Share of entries removed.")] = 0.5,
    rank: Annotated[int | None, typer.Option(help="Rank kept of what is left.")] = None,
    limit: Annotated[float, typer.Option(help="Regret that counts as a catastrophe, for s*.")] = 10.0,
    why: Annotated[
        bool, typer.Option("--why", help="Also what may explain it: rank, tails and sparsity, Jacobian norms.")
    ] = False,
    text: Text = "builtin",
    tokens: Tokens = 1024,
    context: Context = 256,
    batch_size: BatchSize = 1,
    device: Device = "cpu",
    dtype: DType = None,
    bos: Bos = None,
    offline: Offline = False,
    resume: Resume = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Change one thing at a time and measure the loss: which matrices and layers can bear it.

    Writes sensitivity.json and a heat map, the profile that it is compared with as sensitivity/profile.json, with
    --why activations.json and jacobian.json. Interrupted, it goes on with --resume; under
    `accelerate launch -m lyapunov_prune.cli` the processes share the work.
    """
    from lyapunov_prune.profiles.profile import kept_profile
    from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity
    from lyapunov_prune.sensitivity.studies import Compression

    studies = require_studies(study)
    Compression(method, sparsity, rank).require()
    run = run_folder(output, model)
    loaded, calibration = load_inputs(model, text, tokens, context, device, dtype, bos, offline)
    batch = load_batch(loaded, text, tokens, context, bos, offline, "evaluation")
    # run/profile.json is of `profile`, and as a rule by more tokens and seeds.
    beside = run / "sensitivity" / "profile.json"
    result = measure_sensitivity(
        loaded.model,
        batch,
        studies=studies,
        method=method,
        sparsity=sparsity,
        rank=rank,
        limit=limit,
        calibration=calibration,
        profile=kept_profile(beside, loaded.model, calibration, batch_size=batch_size, resume=resume),
        folder=run / "jobs" / "sensitivity",
        resume=resume,
        batch_size=batch_size,
    )
    result.save(run / "sensitivity.json")
    if why:
        explain(run, loaded, calibration, batch_size, resume)
    draw_report(run)
    show(result, as_json, run / "sensitivity.json")
