"""Commands that write a smaller model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyapunov_prune.cli.inputs import (
    chosen_allocation,
    folder_name,
    goes_by_rho,
    load_examples,
    load_inputs,
    parse_schedule_options,
    profile_for,
    require_budget_alone,
    run_folder,
)
from lyapunov_prune.cli.options import (
    Allocation,
    Bits,
    Format,
    GroupSize,
    Images,
    Json,
    KeepPeriod,
    MaxKL,
    Mend,
    MergeAdapter,
    Method,
    Model,
    ModelOptions,
    OnDisk,
    Pattern,
    Pooling,
    Rank,
    RankOptions,
    Reduction,
    Resume,
    ScheduleOptions,
    Seed,
    Sparsity,
    Spend,
    Stored,
    Stream,
    Symmetric,
    Target,
    Temperature,
    TextOptions,
    layer_indices,
    model_option,
    what_option,
)
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.progress import is_main
from lyapunov_prune.ranking.criteria import require_budget, require_known_count

if TYPE_CHECKING:
    from lyapunov_prune.pruning.plan import PruningPlan
    from lyapunov_prune.pruning.provenance import Provenance
    from lyapunov_prune.results.result import Result


def prune(
    model: Model,
    *,
    remove: Annotated[int | None, what_option(help="How many layers, by --criterion.")] = None,
    max_kl: MaxKL = None,
    layers: Annotated[str | None, what_option(help="Layers by hand, as 3,7 (counted from 0).")] = None,
    plan_file: Annotated[Path | None, what_option("--plan", help="A plan.json.")] = None,
    keep_period: KeepPeriod = False,
    by: RankOptions = RankOptions(),
    reduction: Reduction = None,
    format: Format = "plain",
    mend: Mend = False,
    on_disk: OnDisk = False,
    stream: Stream = False,
    merge_adapter: MergeAdapter = False,
    images: Images = None,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    output: Target,
    as_json: Json = False,
) -> None:
    """Remove layers physically, pass the gate, write a plain transformers checkpoint.

    With --what only a part of each layer goes. In a plain checkpoint that costs what it cost: attention and MLP are
    zeroed, an activation is cancelled. With --format compact attentions are gone, and a block without activation is
    one matrix; the checkpoint is smaller and faster, and loads with this package or by the module beside its weights.
    With --mend the layer before each gap learns from the calibration text, without training, to stand in for the gap;
    --criterion best then compares the sets mended.
    With --on-disk, or where the model does not fit in memory, the files are pruned; the gate then computes no logits
    but with --stream, which reads both models one layer at a time.
    """
    if sum(choice is not None for choice in (remove, max_kl, layers, plan_file)) != 1:
        raise LyapunovPruneError("give --remove N, --max-kl X, --layers 3,7 or --plan FILE, one of the four")
    if plan_file is not None and by.what != "layers":
        raise LyapunovPruneError("a plan says what goes; leave out --what")
    if images is not None and (
        plan_file is None or format != "compact" or on_disk or stream or merge_adapter or keep_period or mend
    ):
        raise LyapunovPruneError(
            "--images is for the plan of a ViT or DeiT; give --plan FILE and --format compact, and no --on-disk, "
            "--stream, --merge-adapter, --mend or --keep-period"
        )
    source.require()
    if on_disk or stream:
        source.require_one_place("--on-disk" if on_disk else "--stream")
    by.require(sublayers=remove is not None or max_kl is not None)
    if by.protect is not None and remove is None and max_kl is None:
        raise LyapunovPruneError("--protect is of layers that a criterion chooses; give --remove or --max-kl with it")
    if max_kl is not None:
        require_budget(max_kl)
        require_budget_alone(keep_period)
    if remove is not None or max_kl is not None:
        require_known_count(by.criterion, remove, keep_period)
    if (by.what == "activation") != (reduction is not None):
        raise LyapunovPruneError("--what activation and --reduction go together; give both or neither")
    if mend and (by.what != "layers" or format != "plain"):
        raise LyapunovPruneError(
            "--mend closes the gaps of whole layers in a plain checkpoint; leave out --what and --format"
        )
    if keep_period and by.what != "layers":
        raise LyapunovPruneError(f"{by.what} alone leaves every layer in its place; leave out --keep-period")

    from lyapunov_prune.models.device import resolve_device
    from lyapunov_prune.models.kinds import find_kinds
    from lyapunov_prune.models.packed import is_unpacked
    from lyapunov_prune.models.plain import require_unquantised
    from lyapunov_prune.predictions.expectation import expectation
    from lyapunov_prune.pruning.checkpoint import write_pruned
    from lyapunov_prune.pruning.on_disk import too_large
    from lyapunov_prune.pruning.plan import FIELDS, PruningPlan
    from lyapunov_prune.ranking.budget import remove_under_budget
    from lyapunov_prune.ranking.ranking import LayerRanking, require_periods
    from lyapunov_prune.results.files import require_empty

    require_empty(output)
    why = "--on-disk" if on_disk or stream else ""
    if not why and source.device_map is None:
        why = too_large(model, resolve_device(source.device), offline=source.offline)
    if why:
        refused = {
            "--remove": remove is not None,
            "--max-kl": max_kl is not None,
            "--what": by.what != "layers",
            "--format": format != "plain",
            "--mend": mend,
            "--dtype": source.dtype,
        }
        for option, given in (refused | {"--merge-adapter": merge_adapter}).items():
            if given:
                raise LyapunovPruneError(
                    f"{option} needs the model in memory ({why}); give --layers 3,7 or a --plan FILE of rank --stream, "
                    f"and no {option}"
                )
        _prune_on_disk(model, output, layers, plan_file, keep_period, source.offline, as_json, why, stream)
        return
    if images is not None:
        assert plan_file is not None
        classifier, _, examples = load_examples(model, source, text, images)
        written = write_pruned(classifier, None, PruningPlan.load(plan_file), output, examples, format=format)
        _tell(written, as_json, output)
        return
    loaded, batch = load_inputs(model, source, text, merge_adapter=merge_adapter)
    if by.what == "layers" and is_unpacked(loaded.structure.config):
        raise LyapunovPruneError(
            "the weights are packed integers, and its layers are removed on its files; give --layers 3,7 or a --plan "
            "FILE with --on-disk"
        )
    require_unquantised(loaded.model)  # before anything is measured
    period = find_kinds(loaded.structure).require_period() if keep_period else 1
    plan: PruningPlan
    if layers is not None:
        goes: dict[str, Any] = {FIELDS[by.what]: layer_indices("--layers", layers)}
        plan = PruningPlan.given(loaded.model, **goes, reduction=reduction)
    elif plan_file is not None:
        plan = PruningPlan.load(plan_file)
        plan.require_model(loaded.model)
    else:
        if remove is not None and keep_period:
            require_periods(remove, loaded.structure.num_layers, period)
        ranking = by.rank(loaded, batch, remove, text.batch_size, mend=mend)
        if by.criterion == "best" and not as_json:
            show(ranking, as_json, None)
        if remove is not None:
            plan = ranking.plan(remove, period)
        else:
            assert isinstance(ranking, LayerRanking)  # the others ask for --remove
            assert max_kl is not None
            spent = remove_under_budget(
                loaded.model, batch, ranking, max_kl, temperature=by.temperature, batch_size=text.batch_size
            )
            plan = spent.plan()
            if not as_json:
                show(spent, as_json, None)
                if by.temperature == 1:  # as of the table
                    parts = {"layers": "layers", "attention": "attentions", "mlp": "MLPs"}[by.what]
                    say(expectation().told(float(spent.kl[spent.within - 1]), parts))
    plan.require_periods(period)
    _tell(write_pruned(loaded.model, loaded.tokenizer, plan, output, batch, format=format, mend=mend), as_json, output)


def _tell(provenance: Provenance, as_json: bool, output: Path) -> None:
    if not as_json:
        say("\n".join(filter(None, (provenance.headline(), provenance.plan.stability(), str(provenance.gate)))))
        if provenance.mended is not None:
            show(provenance.mended, as_json, None)
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
    stream: bool,
) -> None:
    from lyapunov_prune.checkpoints.outline import read_outline
    from lyapunov_prune.models.kinds import find_kinds
    from lyapunov_prune.models.loading import checkpoint_folder
    from lyapunov_prune.pruning.on_disk import prune_on_disk
    from lyapunov_prune.pruning.plan import PruningPlan

    if model.endswith(".gguf"):
        raise LyapunovPruneError(
            f"{model} is no safetensors file, and only those are pruned on disk; leave out --on-disk"
        )
    outline = read_outline(checkpoint_folder(model, offline=offline), model)
    if layers is not None:
        plan = PruningPlan.given(outline.identity, layer_indices("--layers", layers))
    else:
        assert plan_file is not None
        plan = PruningPlan.load(plan_file)
    if keep_period:
        plan.require_periods(find_kinds(outline.structure).require_period())
    provenance = prune_on_disk(outline, plan, output, stream=stream)
    if not as_json:
        # Its headline would call the gate passed, of which this is a part.
        checks = provenance.gate.to_frame().to_string(index=False, float_format=lambda x: f"{x:.4g}")
        left = ", ".join(provenance.not_run)
        on = "on files, and on logits of streamed models" if stream else "on files"
        say(f"{plan.headline()}\nPruned on disk ({why}); the gate's checks {on}:\n{checks}\nNot run: {left}.")
    show(provenance, as_json, output, table=False)


def compress(
    model: Model,
    *,
    method: Method = "wanda",
    sparsity: Sparsity = None,
    max_kl: Spend = None,
    rank: Rank = None,
    bits: Bits = None,
    allocation: Allocation = "uniform",
    schedule_option: ScheduleOptions = None,
    pooling: Pooling = None,
    pattern: Pattern = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = False,
    format: Stored = "plain",
    stream: Stream = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    resume: Resume = False,
    output: Target,
    as_json: Json = False,
) -> None:
    """Compress every matrix of the layers; writes a plain transformers checkpoint with compression.json.

    Zeros, low ranks and rounded weights are stored as dense matrices of the same size: the checkpoint shows what
    a compression does to the predictions, and is neither smaller nor faster. With --format compressed-tensors the
    weights that rtn --symmetric rounds to 4 or 8 bits are packed: the checkpoint is smaller, and faster only in an
    engine that has a kernel for them. With --format compact what svd, whitened-svd and balanced cut to low rank is two
    factors: smaller, with fewer multiplications, loaded with this package or by the module beside the weights.
    With --stream each layer is read, compressed and written before the next one.
    With --max-kl the amounts that were tried stand in amounts.json beside it; interrupted, the search goes on with the
    same --output and --resume.
    """
    from lyapunov_prune.checkpoints.saving import write_model
    from lyapunov_prune.compression.compress import compress as compress_model
    from lyapunov_prune.compression.factored import require_low_rank, write_factored
    from lyapunov_prune.compression.factors import require_smaller
    from lyapunov_prune.compression.masks import as_pattern
    from lyapunov_prune.compression.on_disk import compress_on_disk, require_streamed
    from lyapunov_prune.compression.packed import require_packable, require_packed_options, write_packed
    from lyapunov_prune.compression.recipe import require_amount, require_options
    from lyapunov_prune.compression.report import REPORT
    from lyapunov_prune.models.plain import require_unquantised
    from lyapunov_prune.predictions.expectation import expectation
    from lyapunov_prune.ranking.amount import amount_under_budget, require_spendable
    from lyapunov_prune.results.files import require_empty

    require_empty(output)
    keep_of = as_pattern(pattern)
    schedule = chosen_allocation(allocation)
    if max_kl is not None:
        require_budget(max_kl)
        require_spendable(method, schedule, sparsity=sparsity, rank=rank, bits=bits, pattern=pattern)
    else:
        if resume:
            raise LyapunovPruneError("--resume goes on with the search of --max-kl; give both or neither")
        if keep_of and sparsity is None:
            sparsity = 1 - keep_of[0] / keep_of[1]
        require_amount(method, sparsity, rank, bits, schedule)
    options = parse_schedule_options(schedule_option)
    require_options(schedule, options)
    if pooling is not None and not goes_by_rho(schedule):
        raise LyapunovPruneError(f"allocation {allocation} does not measure rho; leave out --pooling")
    packed, factored = format == "compressed-tensors", format == "compact"
    if stream:
        if max_kl is not None:
            raise LyapunovPruneError("--max-kl needs the model in memory; leave it out, or --stream")
        require_streamed(schedule)
    if packed:
        require_packed_options(method, bits, symmetric, schedule, keep_of)
    if factored:
        require_low_rank(method)
    loaded, batch = load_inputs(model, source, text, stream=stream)
    require_unquantised(loaded.model)  # before anything is measured
    if packed:
        require_packable(loaded.model, group_size)
    if factored:
        require_smaller(loaded.model, rank)
    profile = profile_for(schedule, loaded, batch, text.batch_size, pooling)
    results: dict[str, Result] = {}
    if max_kl is not None:
        spent = amount_under_budget(
            loaded.model,
            batch,
            max_kl,
            method=method,
            allocation=allocation,
            profile=profile,
            schedule_options=options,
            group_size=group_size,
            symmetric=symmetric,
            batch_size=text.batch_size,
            folder=run_folder(None, model) / "jobs" / f"compress-{folder_name(str(output.resolve()))}",
            resume=resume,
        )
        sparsity, bits = (spent.amount if spent.unit == unit else None for unit in ("sparsity", "bits"))
        results["amounts.json"] = spent
        if not as_json:
            show(spent, as_json, None)
            say(expectation().told(float(spent.kl[spent.chosen]), "matrices compressed"))
    how: dict[str, Any] = {
        "method": method,
        "sparsity": sparsity,
        "rank": rank,
        "bits": bits,
        "allocation": schedule,
        "profile": profile,
        "schedule_options": options,
        "pattern": keep_of,
        "group_size": group_size,
        "symmetric": symmetric,
    }
    if stream:
        report = compress_on_disk(loaded.model, loaded.tokenizer, output, batch, format=format, **how)
        show(report, as_json, output)
        return
    done = compress_model(loaded.model, batch, **how, batch_size=text.batch_size)
    title, report, tokenizer = f"{Path(model).name}, compressed", done.report, loaded.tokenizer
    if packed:
        report = write_packed(loaded.model, done, tokenizer, output, title)
    else:
        del loaded  # of which nothing is needed where what was written is loaded beside what was compressed
        if factored:
            report = write_factored(done, tokenizer, output, title, results)
        else:
            write_model(done.model, tokenizer, output, results | {REPORT: report}, title, report.about())
    show(report, as_json, output)


def heal(
    model: Annotated[str, typer.Argument(help="Folder of a pruned checkpoint.")],
    *,
    steps: Annotated[int, what_option(min=1, help="Training steps.")] = 100,
    per_step: Annotated[
        int, what_option(min=1, help="Windows of a step; accelerate launch shares them among processes.")
    ] = 1,
    update_rank: Annotated[
        int | None, what_option(min=1, help="Train updates of this rank; else all of the layers.")
    ] = None,
    learning_rate: Annotated[float | None, what_option(help="1e-4 for all, 2e-3 for low rank, if not given.")] = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    self_generated: Annotated[
        bool, what_option("--self-generated", help="Learn from text that the dense model writes, not from --text.")
    ] = False,
    checkpointing: Annotated[
        bool, what_option("--checkpointing", help="Run layers again for the backward pass: less memory, more time.")
    ] = False,
    shard: Annotated[
        bool, what_option("--shard", help="Each process of accelerate launch holds but its part of the layers.")
    ] = False,
    teacher: Annotated[
        str | None, model_option(help="The dense model; not needed for what was made from the built-in one.")
    ] = None,
    source: ModelOptions = ModelOptions(dtype="float32"),
    text: TextOptions = TextOptions(tokens=25600, context=256),
    resume: Resume = False,
    output: Target,
    as_json: Json = False,
) -> None:
    """Train a pruned model to predict what the dense one predicts; writes a plain checkpoint with healing.json.

    Learns from the calibration half of the text, or with --self-generated from as many tokens that the dense model
    writes, and is scored on the other half. Interrupted, it goes on with the same --output and --resume.
    """
    source.require_one_place("heal")

    from lyapunov_prune.checkpoints.saving import write_model
    from lyapunov_prune.healing.heal import REPORT, require_settings
    from lyapunov_prune.healing.heal import heal as heal_model
    from lyapunov_prune.healing.own_text import self_generated as write_text
    from lyapunov_prune.healing.sharded import sharing
    from lyapunov_prune.healing.state import TrainingState
    from lyapunov_prune.models.loading import BUILTIN
    from lyapunov_prune.models.structure import identify
    from lyapunov_prune.models.tokenizers import require_same_tokenizer
    from lyapunov_prune.pruning.provenance import PROVENANCE, Provenance
    from lyapunov_prune.pruning.surgery import share_memory
    from lyapunov_prune.results.files import require_empty

    require_empty(output)
    require_settings(steps, update_rank, learning_rate, temperature)  # before the dense model writes for minutes
    if shard:
        sharing(per_step, update_rank)
    made = Path(model) / PROVENANCE
    provenance = Provenance.load(made) if made.is_file() else None
    if teacher is None:
        if provenance is None:
            raise LyapunovPruneError(f"{model} does not say what it was made from; give the dense model as --teacher")
        if provenance.source != BUILTIN:  # a file that may be a stranger's does not choose what is loaded
            raise LyapunovPruneError(
                f"{model} says that it was made from {provenance.source!r}; if you trust it, give that as --teacher"
            )
        teacher = BUILTIN
    scored = replace(text, tokens=min(text.tokens, 4096))
    if self_generated:
        loaded, held_out = load_inputs(model, source, scored, "evaluation")
    else:
        loaded, batch = load_inputs(model, source, text)
        held_out = scored.load(loaded, "evaluation", offline=source.offline)
    dense = source.load(teacher)
    if provenance is not None and not provenance.plan.model.same_as(identify(dense.model)):
        raise LyapunovPruneError(
            f"{teacher} is not the model that {model} was made from, which {made} records as {provenance.source!r}; "
            "give that one as --teacher"
        )
    require_same_tokenizer(dense.tokenizer, loaded.tokenizer, (teacher, model))
    if provenance is not None:
        share_memory(loaded.model, dense.model, provenance.plan)
    # Of this output alone: two ways to heal one model may run side by side.
    jobs = run_folder(None, model) / "jobs" / f"heal-{folder_name(str(output.resolve()))}"
    if self_generated:
        written = {"tokens": text.tokens, "context": text.context, "seed": seed}
        batch = write_text(dense.model, **written, folder=jobs.with_name(f"{jobs.name}-text"), resume=resume)
    done = heal_model(
        loaded.model,
        dense.model,
        batch,
        steps=steps,
        per_step=per_step,
        rank=update_rank,
        learning_rate=learning_rate,
        temperature=temperature,
        seed=seed,
        folder=jobs,
        resume=resume,
        batch_size=text.batch_size,
        evaluation=held_out,
        checkpointing=checkpointing,
        shard=shard,
    )
    if not is_main():  # of the processes that shared the steps
        return
    results: dict[str, Result] = {REPORT: done.report}
    if provenance is not None:
        results[PROVENANCE] = provenance
    title = f"{Path(model).name}, healed"
    write_model(done.model, loaded.tokenizer, output, results, title, done.report.about())
    TrainingState(jobs, {}).close()  # not resumed, none is left: three times the size of what was trained
    show(done.report, as_json, output)
