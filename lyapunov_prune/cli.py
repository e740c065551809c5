"""The command line: parse, call, save. Results go to files and stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.inputs import (
    explain,
    kept_profile,
    layer_indices,
    load_batch,
    load_inputs,
    profile_model,
    rank_branches,
    require_count,
    require_criterion,
    require_studies,
    require_unseen,
    require_what,
    run_folder,
)
from lyapunov_prune.options import (
    Alpha,
    BatchSize,
    Bos,
    Context,
    Criterion,
    Device,
    DType,
    Epsilon,
    Json,
    KeepPeriod,
    MergeAdapter,
    Method,
    Model,
    Offline,
    OnDisk,
    Output,
    Pooling,
    Resume,
    Seed,
    Seeds,
    Text,
    Tokens,
    What,
)
from lyapunov_prune.terminal import say, show

if TYPE_CHECKING:
    from lyapunov_prune.plan import PruningPlan

app = typer.Typer(
    name="lyapunov-prune",
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(version("lyapunov-prune"))
        raise typer.Exit


@app.callback()
def _common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How compression errors travel through a transformer, and which layers it can do without."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")] = Path("runs/demo"),
    resume: Resume = False,
) -> None:
    """Profile, rank, prune, verify, evaluate and report on the built-in model (minutes on two cores)."""
    from lyapunov_prune.demo import run_demo

    report = run_demo(output, resume=resume, say=say)
    say(f"Report: {report}")


@app.command()
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
    _report(run)
    show(result, as_json, run / "profile.json")


@app.command()
def rank(
    model: Annotated[str | None, typer.Argument(help="As for profile; not needed with --profile.")] = None,
    profile_file: Annotated[Path | None, typer.Option("--profile", help="A profile.json to rank by.")] = None,
    remove: Annotated[int | None, typer.Option(help="Write plan.json for so many layers.")] = None,
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
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Order the layers, or their attention or MLP, for removal; with --remove N writes plan.json."""
    from lyapunov_prune.profile import LayerProfile
    from lyapunov_prune.ranking import rank_layers

    if (model is None) == (profile_file is None):
        raise LyapunovPruneError("give a MODEL to measure or --profile FILE, one of the two")
    require_criterion(criterion, alpha)
    require_what(what, criterion)
    if profile_file is not None:
        if what != "layers":
            raise LyapunovPruneError(f"a profile holds no scores of {what}; give a MODEL to measure")
        measured = LayerProfile.load(profile_file)
        run = output or profile_file.parent
        ranking = rank_layers(measured.contraction, measured.influence, criterion=criterion, alpha=alpha, seed=seed)
    else:
        assert model is not None
        loaded, batch = load_inputs(model, text, tokens, context, device, dtype, bos, offline)
        if remove is not None:
            require_count(remove, loaded.structure.num_layers, what)
        run = run_folder(output, model)
        if what == "layers":
            measured = profile_model(loaded, batch, batch_size, seeds, seed)
            measured.save(run / "profile.json")
            ranking = rank_layers(measured.contraction, measured.influence, criterion=criterion, alpha=alpha, seed=seed)
        else:
            ranking = rank_branches(loaded, batch, what, batch_size, run / "sublayers.json")
    written = None
    if remove is not None:
        written = ranking.plan(remove).save(run / "plan.json")
    show(ranking, as_json, written)


@app.command()
def prune(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the pruned checkpoint; must be empty.")],
    remove: Annotated[int | None, typer.Option(help="How many layers, by --criterion.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers by hand, as 3,7 (counted from 0).")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan.json.")] = None,
    what: What = "layers",
    keep_period: KeepPeriod = False,
    on_disk: OnDisk = False,
    merge_adapter: MergeAdapter = False,
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
    as_json: Json = False,
) -> None:
    """Remove layers physically, pass the gate, write a plain transformers checkpoint.

    With --what attention or mlp these are zeroed instead: the same output as without them, at the same cost.
    With --on-disk, or where the model does not fit in memory, the files are pruned; the gate then computes no logits.
    """
    from lyapunov_prune.checkpoint import write_pruned
    from lyapunov_prune.files import require_empty
    from lyapunov_prune.models.kinds import find_pattern
    from lyapunov_prune.plan import FIELDS, PruningPlan
    from lyapunov_prune.ranking import rank_layers, require_periods
    from lyapunov_prune.shards import too_large

    if sum(choice is not None for choice in (remove, layers, plan_file)) != 1:
        raise LyapunovPruneError("give --remove N, --layers 3,7 or --plan FILE, one of the three")
    if plan_file is not None and what != "layers":
        raise LyapunovPruneError("a plan says what goes; leave out --what")
    require_criterion(criterion, alpha)
    require_what(what, criterion if remove is not None else None)
    if keep_period and what != "layers":
        raise LyapunovPruneError(f"{what} that is zeroed leaves every layer in its place; leave out --keep-period")
    require_empty(output)
    why = "--on-disk" if on_disk else too_large(model, offline=offline) if device == "cpu" else ""
    if why:
        refused = {"--remove": remove is not None, "--what": what != "layers", "--dtype": dtype}
        for option, given in (refused | {"--merge-adapter": merge_adapter}).items():
            if given:
                raise LyapunovPruneError(
                    f"{option} needs the model in memory ({why}); give --layers 3,7 or a --plan FILE of rank, and no "
                    f"{option}"
                )
        _prune_on_disk(model, output, layers, plan_file, keep_period, offline, as_json, why)
        return
    loaded, batch = load_inputs(model, text, tokens, context, device, dtype, bos, offline, merge_adapter=merge_adapter)
    period = find_pattern(loaded.structure).require_period() if keep_period else 1
    plan: PruningPlan
    if layers is not None:
        plan = PruningPlan.given(loaded.model, **{FIELDS[what]: layer_indices(layers)})
    elif plan_file is not None:
        plan = PruningPlan.load(plan_file)
        plan.require_model(loaded.model)
    else:
        assert remove is not None
        require_count(remove, loaded.structure.num_layers, what)
        if keep_period:
            require_periods(remove, loaded.structure.num_layers, period)
        if what == "layers":
            measured = profile_model(loaded, batch, batch_size, seeds, seed)
            ranking = rank_layers(measured.contraction, measured.influence, criterion=criterion, alpha=alpha, seed=seed)
        else:
            ranking = rank_branches(loaded, batch, what, batch_size, None)
        plan = ranking.plan(remove, period)
    plan.require_periods(period)
    provenance = write_pruned(loaded.model, loaded.tokenizer, plan, output, batch)
    if not as_json:
        say(f"{plan.headline()}\n{provenance.gate}")
    show(provenance, as_json, output, table=False)


def _prune_on_disk(
    model: str,
    output: Path,
    layers: str | None,
    plan_file: Path | None,
    keep_period: bool,
    offline: bool,
    as_json: bool,
    why: str,
) -> None:
    from lyapunov_prune.models.kinds import find_pattern
    from lyapunov_prune.models.loading import checkpoint_folder
    from lyapunov_prune.outline import read_outline
    from lyapunov_prune.plan import PruningPlan
    from lyapunov_prune.shards import prune_on_disk

    if model.endswith(".gguf"):
        raise LyapunovPruneError(
            f"{model} is no safetensors file, and only those are pruned on disk; leave out --on-disk"
        )
    outline = read_outline(checkpoint_folder(model, offline=offline), model)
    if layers is not None:
        plan = PruningPlan.given(outline.identity, layer_indices(layers))
    else:
        assert plan_file is not None
        plan = PruningPlan.load(plan_file)
    if keep_period:
        plan.require_periods(find_pattern(outline.structure).require_period())
    provenance = prune_on_disk(outline, plan, output)
    if not as_json:
        # Its headline would call the gate passed, of which this is a part.
        checks = provenance.gate.to_frame().to_string(index=False, float_format=lambda x: f"{x:.4g}")
        left = ", ".join(provenance.not_run)
        say(f"{plan.headline()}\nPruned on disk ({why}); the gate's checks on files:\n{checks}\nNot run: {left}.")
    show(provenance, as_json, output, table=False)


@app.command("eval")
def evaluate(
    model: Model,
    against: Annotated[
        str | None, typer.Option(help="A reference model, measured in the same run (the dense one).")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure prefill and decoding speed too.")] = False,
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
    """Perplexity, and speed on request; writes eval.json."""
    from lyapunov_prune.evaluation.evaluation import Evaluation
    from lyapunov_prune.evaluation.perplexity import perplexity
    from lyapunov_prune.evaluation.speed import measure_speed
    from lyapunov_prune.models.loading import load

    names = [against, model] if against else [model]
    for name in names:
        require_unseen(Path(name), text, split)
    first, batch = load_inputs(names[0], text, tokens, context, device, dtype, bos, offline, split)
    prompt = min(256, (first.structure.max_context or 512) // 2)
    models = {names[0]: first.model}
    for name in names[1:]:
        models[name] = load(name, dtype=dtype, device=device, offline=offline).model
    result = Evaluation(
        perplexities=tuple(perplexity(m, batch, batch_size=batch_size) for m in models.values()),
        speed=measure_speed(models, prompt=prompt) if speed else None,
    )
    run = run_folder(output, model)
    result.save(run / "eval.json")
    _report(run)
    show(result, as_json, run / "eval.json")
    if result.speed and not as_json:
        show(result.speed, as_json, None)


@app.command()
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
    from lyapunov_prune.checks import check_bounds, check_grid

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
    _report(run)
    show(result, as_json, written)
    if not result.passed:
        raise CheckFailed(f"{len(result.violations)} bounds are violated; see {written}")


@app.command()
def sensitivity(
    model: Model,
    study: Annotated[
        str,
        typer.Option(
            help="all, or some of matrix, group, layer, component, forward, backward, sparsity, rank, layer0, cliff, "
            "greedy, threshold, removal."
        ),
    ] = "group,layer,removal",
    method: Annotated[str, typer.Option(help="magnitude or wanda.")] = "magnitude",
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

    Writes profile.json, sensitivity.json and a heat map, with --why activations.json and jacobian.json. Interrupted,
    it goes on with --resume; under `accelerate launch -m lyapunov_prune.cli` the processes share the work.
    """
    from lyapunov_prune.sensitivity import measure_sensitivity
    from lyapunov_prune.studies import Compression

    studies = require_studies(study)
    Compression(method, sparsity, rank).require()
    run = run_folder(output, model)
    loaded, calibration = load_inputs(model, text, tokens, context, device, dtype, bos, offline)
    batch = load_batch(loaded, text, tokens, context, bos, offline, "evaluation")
    result = measure_sensitivity(
        loaded.model,
        batch,
        studies=studies,
        method=method,
        sparsity=sparsity,
        rank=rank,
        limit=limit,
        calibration=calibration,
        profile=kept_profile(run, loaded, calibration, batch_size, resume),
        folder=run / "jobs" / "sensitivity",
        resume=resume,
        batch_size=batch_size,
    )
    result.save(run / "sensitivity.json")
    if why:
        explain(run, loaded, calibration, batch_size, resume)
    _report(run)
    show(result, as_json, run / "sensitivity.json")


@app.command()
def theorems(
    verify: Annotated[bool, typer.Option("--verify", help="Run lake build and lake test first.")] = False,
    as_json: Json = False,
) -> None:
    """List the theorems: what they say, where they are used, whether lake verified them here."""
    from lyapunov_prune import theorems as registry

    if verify:
        registry.verify()
    state = registry.verification()
    if as_json:
        rows = registry.theorem_frame().to_dict("records")
        print(json.dumps({"verified": state.verified, "message": state.message, "theorems": rows}))
        return
    say(state.message)
    for t in registry.theorems():
        say(f"{t.number or '':>3} {t.name}: {t.statement} Used by: {', '.join(t.used_by) or 'nothing yet'}.")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder with the results of a run.")]) -> None:
    """Draw the figures and the self-contained report.html of a run."""
    from lyapunov_prune.report.page import write_report

    say(str(write_report(run)))


def _report(run: Path) -> None:
    from lyapunov_prune.report.page import write_report

    write_report(run)


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2, a failed check exit code 1.

    Typer itself makes Ctrl-C exit code 130.
    """
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="lyapunov-prune", standalone_mode=False)
    except LyapunovPruneError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:  # a usage error
        _fail(f"{error.format_message().rstrip('.')}; see lyapunov-prune COMMAND --help", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
