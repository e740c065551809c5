"""Compress matrices, in memory or a layer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lyapunov_prune.cli.inputs import (
    chosen_allocation,
    format_for,
    jobs_folder,
    load_inputs,
    profile_for,
    reads_text,
    windows_at_once,
)
from lyapunov_prune.cli.options import (
    IN_MEMORY,
    Allocation,
    Bits,
    Correction,
    GroupSize,
    Json,
    Method,
    Model,
    ModelOptions,
    Pattern,
    Rank,
    Resume,
    Sparsity,
    Spend,
    Stored,
    Stream,
    Target,
    TextOptions,
    Weighted,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import say, show
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.export.table import FORMATS, require_streamed_format

if TYPE_CHECKING:
    from lyapunov_prune.results.result import Result


def compress(
    model: Model,
    *,
    method: Method = "wanda",
    sparsity: Sparsity = None,
    max_kl: Spend = None,
    rank: Rank = None,
    bits: Bits = None,
    allocation: Allocation = "uniform",
    pattern: Pattern = None,
    group_size: GroupSize = None,
    weighted: Weighted = False,
    correction: Correction = 0.0,
    format: Stored = "plain",
    stream: Stream = False,
    source: ModelOptions = ModelOptions(),
    text: TextOptions = TextOptions(),
    resume: Resume = False,
    output: Target,
    as_json: Json = False,
    given: Given = Given(),
) -> None:
    """Compress every matrix of the layers; writes a plain transformers checkpoint with compression.json.

    Zeros, low ranks and rounded weights are stored as dense matrices of the same size: the checkpoint shows what a
    compression does to the predictions, and is neither smaller nor faster. With --format packed rtn and
    gptq round to 4 or 8 bits on grids around 0, and the weights are packed: the checkpoint is smaller, and faster only
    in an engine that has a kernel for them. With --format compact what svd, whitened-svd and balanced cut to low rank
    is two factors: smaller, with fewer multiplications, loaded with this package or by the module beside the weights.
    With --stream each layer is read, compressed and written before the next one.
    With --max-kl the amounts that were tried stand in amounts.json beside it; interrupted, the search goes on with the
    same --output and --resume.
    """
    from lyapunov_prune.compression.amount import compress_under_budget, require_spendable
    from lyapunov_prune.compression.compress import compress as compress_model
    from lyapunov_prune.compression.masks import as_pattern
    from lyapunov_prune.compression.recipe import require_amount, require_options
    from lyapunov_prune.compression.report import REPORT
    from lyapunov_prune.export.format import Asked
    from lyapunov_prune.export.recipes import recipes_of
    from lyapunov_prune.export.streamed import compress_on_disk, require_streamed
    from lyapunov_prune.models.left_out import require_whole
    from lyapunov_prune.models.plain import require_unquantised
    from lyapunov_prune.predictions.expectation import expectation
    from lyapunov_prune.results.files import require_empty, write_whole

    require_empty(output)
    keep_of = as_pattern(pattern)
    schedule = chosen_allocation(allocation)
    if max_kl is not None:
        jobs = jobs_folder("compress", model, output)
        require_spendable(method, schedule, sparsity=sparsity, rank=rank, bits=bits, pattern=pattern)
    else:
        given.refuse("goes on with the search of --max-kl; give both or neither", "resume")
        if keep_of and sparsity is None:
            sparsity = 1 - keep_of[0] / keep_of[1]
        require_amount(method, sparsity, rank, bits, schedule)
    require_options(schedule, {}, bits)
    errors_used: dict[str, Any] = {"weighted": weighted, "correction": correction}
    METHODS.make(method, **{option: value for option, value in errors_used.items() if value})
    reads = max_kl is not None or reads_text(method, schedule)
    if not reads:
        given.refuse_record(
            f"has no effect: {method} by {allocation} looks at weights alone; leave it out",
            TextOptions,
        )
    format = format_for(output, format, given)
    stored = FORMATS.make(format)
    if stream:
        given.refuse(IN_MEMORY, "max_kl", "weighted", "correction")
        require_streamed(schedule)
        require_streamed_format(format, "compress")
    asked = Asked(method, schedule, rank, bits, keep_of, group_size, stored.symmetric)
    stored.require_method(asked)
    loaded, batch = (
        load_inputs(model, source, text, stream=stream) if reads else (source.load(model, stream=stream), None)
    )
    batch_size = windows_at_once(loaded, text.context)
    require_unquantised(loaded.model)  # before anything is measured
    require_whole(loaded.model)
    stored.require_model(loaded.model, asked)
    profile = profile_for(schedule, loaded, batch, batch_size) if batch is not None else None
    results: dict[str, Result] = {}
    how: dict[str, Any] = {
        "method": method,
        "allocation": schedule,
        "profile": profile,
        "group_size": group_size,
        "symmetric": stored.symmetric,
        **errors_used,
    }
    amount: dict[str, Any] = {"sparsity": sparsity, "rank": rank, "bits": bits, "pattern": keep_of}
    if stream:
        report = compress_on_disk(loaded.model, loaded.tokenizer, output, batch, format=format, **how, **amount)
        show(report, as_json, output, kept=output / REPORT)
        return
    how["batch_size"] = batch_size
    if max_kl is None:
        done = compress_model(loaded.model, batch, **how, **amount)
    else:
        assert batch is not None  # `reads`
        spent, done = compress_under_budget(loaded.model, batch, max_kl, **how, folder=jobs, resume=resume)
        results["amounts.json"] = spent
        if not as_json:
            show(spent, as_json, None, kept=output / "amounts.json")
            say(expectation().told(float(spent.kl[spent.chosen]), "matrices compressed"))
    tokenizer, dense = loaded.tokenizer, loaded.model if stored.keeps_dense else None
    del loaded  # what was written is loaded beside what was compressed: no room for a third
    by_layer = isinstance(schedule, str) and schedule.startswith("bits-")
    recipes = recipes_of(done.model, done.report) if by_layer else {}
    report = stored.write(done, dense, tokenizer, output, f"{Path(model).name}, compressed", results)
    for name, recipe in recipes.items():
        write_whole(output / name, recipe)
    show(report, as_json, output, kept=output / REPORT)
