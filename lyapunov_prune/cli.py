"""The command line: parse, call, save. Results go to files and stdout, progress to stderr."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
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
    Method,
    Model,
    Offline,
    Output,
    Pooling,
    Seed,
    Seeds,
    Text,
    Tokens,
)
from lyapunov_prune.terminal import say, show

if TYPE_CHECKING:
    from lyapunov_prune.models.loading import Loaded
    from lyapunov_prune.plan import PruningPlan
    from lyapunov_prune.profile import LayerProfile
    from lyapunov_prune.text import TokenBatch

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
    resume: Annotated[bool, typer.Option("--resume", help="Keep the steps already done.")] = False,
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
    loaded, batch = _load(model, text, tokens, context, device, dtype, bos, offline)
    result = _profile(loaded, batch, batch_size, seeds, seed, epsilon, method, pooling)
    run = _run_folder(output, model)
    result.save(run / "profile.json")
    _report(run)
    show(result, as_json, run / "profile.json")


@app.command()
def rank(
    model: Annotated[str | None, typer.Argument(help="As for profile; not needed with --profile.")] = None,
    profile_file: Annotated[Path | None, typer.Option("--profile", help="A profile.json to rank by.")] = None,
    remove: Annotated[int | None, typer.Option(help="Write plan.json for so many layers.")] = None,
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
    """Order the layers for removal; with --remove N writes plan.json."""
    from lyapunov_prune.profile import LayerProfile
    from lyapunov_prune.ranking import rank_layers

    if (model is None) == (profile_file is None):
        raise LyapunovPruneError("give a MODEL to measure or --profile FILE, one of the two")
    _require_criterion(criterion, alpha)
    if profile_file is not None:
        measured = LayerProfile.load(profile_file)
        run = output or profile_file.parent
    else:
        assert model is not None
        loaded, batch = _load(model, text, tokens, context, device, dtype, bos, offline)
        if remove is not None:
            _require_count(remove, loaded.structure.num_layers)
        measured = _profile(loaded, batch, batch_size, seeds, seed)
        run = _run_folder(output, model)
        measured.save(run / "profile.json")
    ranking = rank_layers(measured.contraction, measured.influence, criterion=criterion, alpha=alpha, seed=seed)
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
    """Remove layers physically, pass the gate, write a plain transformers checkpoint."""
    from lyapunov_prune.checkpoint import write_pruned
    from lyapunov_prune.files import require_empty
    from lyapunov_prune.plan import PruningPlan
    from lyapunov_prune.ranking import rank_layers

    if sum(choice is not None for choice in (remove, layers, plan_file)) != 1:
        raise LyapunovPruneError("give --remove N, --layers 3,7 or --plan FILE, one of the three")
    _require_criterion(criterion, alpha)
    require_empty(output)
    loaded, batch = _load(model, text, tokens, context, device, dtype, bos, offline)
    plan: PruningPlan
    if layers is not None:
        plan = PruningPlan.given(loaded.model, _indices(layers))
    elif plan_file is not None:
        plan = PruningPlan.load(plan_file)
        plan.require_model(loaded.model)
    else:
        assert remove is not None
        _require_count(remove, loaded.structure.num_layers)
        measured = _profile(loaded, batch, batch_size, seeds, seed)
        ranking = rank_layers(measured.contraction, measured.influence, criterion=criterion, alpha=alpha, seed=seed)
        plan = ranking.plan(remove)
    provenance = write_pruned(loaded.model, loaded.tokenizer, plan, output, batch)
    if not as_json:
        say(f"{plan.headline()}\n{provenance.gate}")
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
        _require_unseen(Path(name), text, split)
    first, batch = _load(names[0], text, tokens, context, device, dtype, bos, offline, split)
    prompt = min(256, (first.structure.max_context or 512) // 2)
    models = {names[0]: first.model}
    for name in names[1:]:
        models[name] = load(name, dtype=dtype, device=device, offline=offline).model
    result = Evaluation(
        perplexities=tuple(perplexity(m, batch, batch_size=batch_size) for m in models.values()),
        speed=measure_speed(models, prompt=prompt) if speed else None,
    )
    run = _run_folder(output, model)
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
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Approximate every matrix and check its bound on every forward; writes bounds.json.

    Thirty settings of sparsity, rank and cache radius, or the one given. Exit code 1 on a violation.
    """
    from lyapunov_prune.checks import check_bounds, check_grid

    loaded, batch = _load(model, text, tokens, context, device, dtype, bos, offline)
    if sparsity is None and rank is None and cache_radius is None:
        result = check_grid(loaded.model, batch, batch_size=batch_size)
    else:
        result = check_bounds(
            loaded.model,
            batch,
            sparsity=sparsity or 0.0,
            rank=rank,
            cache_radius=cache_radius or 0.0,
            batch_size=batch_size,
        )
    written = result.save(_run_folder(output, model) / "bounds.json")
    show(result, as_json, written)
    if not result.passed:
        raise CheckFailed(f"{len(result.violations)} bounds are violated; see {written}")


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


def _load(
    model: str,
    text: str,
    tokens: int,
    context: int,
    device: str,
    dtype: str | None,
    bos: bool | None,
    offline: bool,
    split: str = "calibration",
) -> tuple[Loaded, TokenBatch]:
    from lyapunov_prune.models.loading import load
    from lyapunov_prune.text import as_batch, load_text, require_context, require_source

    require_source(text)  # before minutes of loading
    loaded = load(model, dtype=dtype, device=device, offline=offline)
    require_context(loaded.structure, context)
    batch = load_text(
        text,
        loaded.tokenizer,
        tokens=tokens,
        context=context,
        split=split,  # type: ignore[arg-type]
        bos=bos,
        offline=offline,
    )
    return loaded, as_batch(loaded.model, batch)


def _profile(
    loaded: Loaded,
    batch: TokenBatch,
    batch_size: int,
    seeds: int,
    seed: int,
    epsilon: float = 1e-2,
    method: Any = "difference",
    pooling: Any = "energy",
) -> LayerProfile:
    from lyapunov_prune.profile import profile_layers

    return profile_layers(
        loaded.model,
        batch,
        epsilon=epsilon,
        seeds=range(seed, seed + seeds),
        method=method,
        pooling=pooling,
        batch_size=batch_size,
    )


def _require_criterion(criterion: str, alpha: float) -> None:
    """Before minutes of measuring, as below: the ranking would refuse the same."""
    from lyapunov_prune.ranking import CRITERIA

    if criterion not in CRITERIA:
        raise LyapunovPruneError(f"unknown criterion {criterion!r}; give one of {', '.join(CRITERIA)}")
    if not 0 <= alpha <= 1:
        raise LyapunovPruneError(f"alpha {alpha:g} is outside [0, 1]; give a weight between them")


def _require_count(remove: int, layers: int) -> None:
    """Before minutes of measuring: the plan would refuse the same."""
    if not 1 <= remove < layers:
        raise LyapunovPruneError(f"cannot remove {remove} of {layers} layers; give 1 to {layers - 1}")


def _require_unseen(folder: Path, text: str, split: str) -> None:
    """Refuse to score a pruned model on the slice that its layers were chosen with."""
    from lyapunov_prune.checkpoint import PROVENANCE, Provenance

    if not (folder / PROVENANCE).is_file():
        return
    seen = {(m.text, m.split) for m in Provenance.load(folder / PROVENANCE).plan.measured_on}
    if any(_same_text(text, source) and (split in ("all", part)) for source, part in seen):
        raise LyapunovPruneError(f"{folder} was chosen on {text}; use --split evaluation or another --text")


def _same_text(a: str, b: str) -> bool:
    return a == b or (Path(a).is_file() and Path(a).resolve() == Path(b).resolve())


def _indices(layers: str) -> list[int]:
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError:
        raise LyapunovPruneError(f"--layers {layers!r} is no list of numbers; write it as 3,7") from None


def _run_folder(output: Path | None, model: str) -> Path:
    return output or Path("runs") / re.sub(r"[^\w.-]+", "-", model).strip("-.")


def _report(run: Path) -> None:
    from lyapunov_prune.report.page import write_report

    write_report(run)
