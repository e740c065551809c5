"""A pruned model as a checkpoint, plain or compact, with its card and provenance, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.arguments import checked
from lyapunov_prune.data.batch import TokenBatch, Tokens
from lyapunov_prune.data.examples import Examples, as_examples, model_inputs
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact, require_compact
from lyapunov_prune.export.compact_checkpoint import save_compact
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.mending.judge import judged_mends
from lyapunov_prune.mending.mend import Mend
from lyapunov_prune.merging.merge import Merged, merge_layers
from lyapunov_prune.merging.table import require_reduction
from lyapunov_prune.models.classifiers import looks_at_images
from lyapunov_prune.models.decoder import Decoder, Model, model_of, wrap_any
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import plain
from lyapunov_prune.pruning.mirroring import require_mirrored
from lyapunov_prune.pruning.operation import Operation
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance, describe, require_passed, save
from lyapunov_prune.pruning.removal_gate import check_removal
from lyapunov_prune.pruning.surgery import cut
from lyapunov_prune.results.files import require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of

# How a part of a layer that goes is stored: by numbers of the same size, or not at all.
Format = Literal["plain", "compact"]


@checked
def write_pruned(
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None,
    plan: PruningPlan,
    target: str | Path,
    batch: Examples | Tokens | None = None,
    *,
    format: Format = "plain",
    mend: bool = False,
    judge: TokenBatch | None = None,
) -> Provenance:
    """Cut what `plan` names out of `model`, pass the gate on the saved files, and write the folder `target`.

    Whole layers leave. Of layers that stay, `plain` stores what goes at its full size, which saves no time or memory:
    zero output projections for attention and MLP, and for an activation matrices that cancel it (`mirroring`). In
    `compact` attentions are gone and blocks without activation are one matrix (`make_compact`). A reduction is fitted
    on `batch`, in `model` as it is, so both formats hold the same maps. With `mend` the gaps of whole layers are closed
    on every second window of `batch`, which costs no parameter, if the others and the text `judge` say that it pays
    (`mending.judge.judged_mends`); else the cut model is written as it is, and the provenance says so. A classifier of
    images, whose `batch` holds images and which has no tokenizer, is written compact.

    The folder loads with `AutoModelForCausalLM.from_pretrained` (a decoder inside a multimodal model: with the
    class of that), a compact one as its card says, and holds the tokenizer, a model
    card (README.md), `provenance.json` and `history.json`. Raises CheckFailed when the gate fails and
    LyapunovPruneError for a format that cannot hold the plan, for activations or mending without a `batch`, for gaps
    that cannot be mended, when the target is not empty or the disk refuses; either way nothing is left at `target`.
    """
    require_empty(target)
    require_whole(model_of(model))
    decoder = plain(model, wrap_any)
    plan.require_model(decoder)
    batch = None if batch is None else as_examples(decoder, batch)
    _require_possible(decoder, plan, batch, format)
    lesson = _mended_by(plan, batch, format) if mend else None
    if batch is not None:
        first = batch.take([0])
        # Else the gate would blame the removal.
        require_finite(
            decoder.structure, model_inputs(decoder.model, first, 1)[0], first.measured_on(decoder.model).text
        )
    merged: tuple[Merged, ...] = ()
    if batch is not None and plan.reduction is not None:
        merged = merge_layers(decoder, batch, plan.drop_activation, plan.reduction)
        plan = plan.seen_on(batch.measured_on(decoder.model))
    mends: tuple[Mend, ...] = ()
    mended = None
    if lesson is not None:
        mends, mended = judged_mends(decoder, plan.remove, lesson, judge)
        plan = plan.seen_on(mended.measured_on)
        for each in mended.judgements:
            plan = plan.seen_on(each.measured_on)
    cuts = Cuts.of(plan, merged)
    compact = format == "compact"
    operation = Operation(plan, merged, mends)
    pruned = wrap_any(make_compact(decoder, cuts, shared=True)) if compact else cut(decoder, operation, shared=True)
    plan.require_model(
        decoder
    )  # had the cut written into what both share, the gate would hold the fault against itself
    with whole_folder(target) as folder:
        if compact:
            gate = save_compact(folder, decoder, pruned.model, tokenizer, cuts, batch)
        else:
            assert not isinstance(batch, ImageBatch)  # `_require_possible`
            save(pruned.model, tokenizer, folder)
            gate = check_removal(decoder, pruned, operation, batch, folder)
            require_passed(gate)
            history_of(pruned.model).save(folder / HISTORY)
        return describe(folder, plan, gate, decoder.structure, pruned.model, format=format, mended=mended)


def _mended_by(plan: PruningPlan, batch: Examples | None, format: Format) -> TokenBatch:
    """The text to mend the gaps of `plan` by; raises LyapunovPruneError for what cannot be mended."""
    plan.require_gaps()
    if format != "plain":
        raise LyapunovPruneError("a mended model is a plain checkpoint of fewer layers; leave out --format compact")
    if not isinstance(batch, TokenBatch):
        raise LyapunovPruneError("gaps are mended on a text; give a batch of tokens")
    return batch


def _require_possible(decoder: Decoder, plan: PruningPlan, batch: Examples | None, format: Format) -> None:
    """Raise LyapunovPruneError, before anything is fitted, for a plan that `format` cannot hold."""
    if format not in get_args(Format):
        raise LyapunovPruneError(f"unknown format {format!r}; give one of {', '.join(get_args(Format))}")
    if format == "compact":
        require_compact(decoder, plan)
    elif looks_at_images(decoder.model):
        raise LyapunovPruneError(
            f"{type(decoder.model).__name__} looks at images and is cut to compact only; give that format"
        )
    if plan.reduction is None:
        return
    for layer in plan.drop_activation:
        require_reduction(plan.reduction, find_feedforward(decoder.structure, layer))
    if format == "plain":
        require_mirrored(decoder.structure, plan.drop_activation)
    if batch is None:
        raise LyapunovPruneError(f"reduction {plan.reduction} is fitted on a text; give a batch")
