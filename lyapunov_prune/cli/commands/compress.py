"""Compress matrices, in memory or a layer at a time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from lyapunov_prune.cli.inputs import chosen_allocation, format_for, load_inputs, windows_at_once
from lyapunov_prune.cli.jobs import first_goes_on
from lyapunov_prune.cli.options import (
    Allocation,
    Bits,
    GroupSize,
    Inputs,
    Method,
    Model,
    Sparsity,
    Stored,
    Target,
    TextOptions,
    share_of,
)
from lyapunov_prune.cli.records import Given
from lyapunov_prune.cli.terminal import show
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.table import FORMATS, require_streamed_format


def compress(
    model: Model,
    *,
    method: Method = "wanda",
    sparsity: Sparsity = None,
    bits: Bits = None,
    allocation: Allocation = "uniform",
    group_size: GroupSize = None,
    format: Stored = "plain",
    inputs: Inputs = Inputs(),
    output: Target,
    given: Given = Given(),
) -> None:
    """Compress every matrix of the layers; writes a plain transformers checkpoint with compression.json.

    In a plain checkpoint zeros, low ranks and rounded weights are stored as dense matrices of the same size: it shows
    what the compression does to the predictions, but is neither smaller nor faster. --format packed stores the 4 or 8
    bits of rtn and gptq as packed integers: the checkpoint is smaller, and faster in an engine that has a kernel for
    them. With --device disk each layer is read, compressed and written before the next one.
    """
    from lyapunov_prune.compression.asking import require_amount, require_options

    share, keep_of = _share_or_pattern(sparsity)
    schedule = chosen_allocation(allocation)
    require_amount(method, share, None, bits, schedule)
    require_options(schedule, {})
    reads = METHODS[method].needs != "nothing"
    if not reads:
        given.refuse_record(f"has no effect: {method} reads weights only; leave it out", TextOptions)
    format = format_for(output, format, given)
    stored = FORMATS.make(format)
    if inputs.disk:
        require_streamed_format(format, "compress")

    from lyapunov_prune.compression.compress import compress as compress_model
    from lyapunov_prune.compression.recipe import CompressionRequest
    from lyapunov_prune.compression.report import REPORT
    from lyapunov_prune.export.streamed import compress_on_disk
    from lyapunov_prune.models.left_out import require_whole
    from lyapunov_prune.models.plain import require_weights

    amount: dict[str, Any] = {"sparsity": share, "bits": bits, "pattern": keep_of}
    how: dict[str, Any] = {"method": method, "allocation": schedule, "group_size": group_size}
    how["symmetric"] = stored.symmetric
    asked = CompressionRequest(**how, **amount)
    stored.require_method(asked)
    loaded, batch = load_inputs(model, inputs) if reads else (inputs.load(model), None)
    batch_size = windows_at_once(loaded, inputs.context)
    require_weights(loaded.model, "unquantised")  # before anything is measured
    require_whole(loaded.model)
    stored.require_model(loaded.model, asked)
    if inputs.disk:
        first_goes_on()
        report = compress_on_disk(loaded.model, loaded.tokenizer, output, batch, format=format, **how, **amount)
        show(report, output, kept=output / REPORT)
        return
    done = compress_model(loaded.model, batch, **how, **amount, batch_size=batch_size)
    first_goes_on()
    dense = loaded.model if stored.keeps_dense else None
    tokenizer = loaded.tokenizer
    del loaded  # what was written is loaded beside what was compressed: no room for a third
    report = stored.write(output, done, tokenizer, f"{Path(model).name}, compressed", dense)
    show(report, output, kept=output / REPORT)


def _share_or_pattern(sparsity: str | None) -> tuple[float | None, tuple[int, int] | None]:
    """The share removed, and the pattern (keep, of) if `sparsity` is one, as 2:4."""
    from lyapunov_prune.compression.masks import as_pattern

    share: float | None = None
    keep_of = as_pattern(sparsity) if sparsity is not None and ":" in sparsity else None
    if keep_of is not None:
        share = 1 - keep_of[0] / keep_of[1]
    elif sparsity is not None:
        with suppress(ValueError):
            share = share_of(sparsity)
    if sparsity is not None and not (share and 0 < share < 1):
        raise LyapunovPruneError(
            f"--sparsity {sparsity!r} is neither a share above 0 and below 1, as 0.5 or 50%, nor a pattern, as 2:4"
        )
    return share, keep_of
