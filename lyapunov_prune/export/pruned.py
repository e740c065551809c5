"""A pruned model as a checkpoint, plain or compact, with its card and provenance, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lyapunov_prune.data.batch import TokenBatch, Tokens
from lyapunov_prune.data.examples import Examples, as_examples, model_inputs
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.format import CutModel, Format
from lyapunov_prune.export.table import FORMATS, formats_of
from lyapunov_prune.forward.hooks import require_finite
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.judge import judged_mends, second_text
from lyapunov_prune.mending.mend import Mend
from lyapunov_prune.merging.merge import Merged, merge_layers
from lyapunov_prune.merging.table import require_reduction
from lyapunov_prune.models.decoder import Decoder, takes_model, wrap
from lyapunov_prune.models.feedforward import find_feedforward
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import PlainAny
from lyapunov_prune.models.units import Refits
from lyapunov_prune.pruning.alone import RoundedAlone
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.pruning.removal import refits_of
from lyapunov_prune.pruning.removed import ChannelsGone, PartsGone
from lyapunov_prune.pruning.surgery import Operation


@takes_model
def write_pruned(
    model: PlainAny,
    tokenizer: PreTrainedTokenizerBase | None,
    plan: PruningPlan,
    target: str | Path,
    batch: Examples | Tokens | None = None,
    *,
    format: str = "plain",
    mend: bool = False,
    judge: TokenBatch | None = None,
    alone: RoundedAlone | None = None,
) -> Provenance:
    """Cut what `plan` names out of `model`, pass the gate on the saved files, and write the folder `target`.

    `format` is a name in `table.FORMATS`. Whole layers, channels and experts are removed. In `compact`, attentions of
    kept layers can be gone too, and blocks without activation are one matrix (`make_compact`), by a reduction that is
    fitted on `batch` in the unchanged `model`.

    With `mend`, maps that close the gaps of whole layers are fitted on half of the windows of `batch`. They add no
    parameter, and are kept if the other windows and the text `judge` say that they pay (`mending.judge.judged_mends`);
    else the cut model is written, and the provenance says so. If channels are removed and there is a `batch`, the last
    matrices are refitted and judged in the same way (`mending.refit.judged_refits`). An image classifier, whose `batch`
    holds images and which has no tokenizer, is written compact. The card says what the whole model would lose at the
    same bytes, if that is given (`alone`).

    The folder loads with `AutoModelForCausalLM.from_pretrained` (a multimodal model with its own class, a compact one
    as its card says). It holds the tokenizer, a model card (README.md), `provenance.json` and `history.json`. Raises
    CheckFailed if the gate fails. Raises LyapunovPruneError for a format that cannot hold the plan, for activations or
    mending without a `batch`, for gaps that cannot be mended, and if the target is not empty or writing fails. In both
    cases nothing is left at `target`.
    """
    stored = FORMATS.make(format)
    stored.require_names(model.model.config._name_or_path, Path(target))
    require_whole(model.model)
    if mend or isinstance(plan.gone, ChannelsGone):
        wrap(model)  # raises for classifiers of images
    plan.require_model(model.identity)
    batch = None if batch is None else as_examples(model, batch)
    _require_held(stored, model, plan, mend=mend)
    reduction = plan.gone.reduction if isinstance(plan.gone, PartsGone) else None
    unfitted = "gaps are mended" if mend else f"reduction {reduction} is fitted"
    if (mend and not isinstance(batch, TokenBatch)) or (reduction is not None and batch is None):
        raise LyapunovPruneError(f"{unfitted} on a text; give a batch")
    if batch is not None:
        first = batch.take([0])
        # A broken original would otherwise be blamed on the removal.
        require_finite(model.structure, model_inputs(model.model, first, 1)[0], first.measured_on(model).text)
    merged: tuple[Merged, ...] = ()
    if batch is not None and isinstance(plan.gone, PartsGone) and plan.gone.reduction is not None:
        merged = merge_layers(model, batch, plan.gone.activation, plan.gone.reduction)
        plan = plan.seen_on(batch.measured_on(model))
    mends: tuple[Mend, ...] = ()
    refits: Refits = {}
    mended = None
    if mend and isinstance(batch, TokenBatch):
        mends, mended = judged_mends(model, plan.remove, batch, judge)
    elif isinstance(plan.gone, ChannelsGone) and isinstance(batch, TokenBatch):
        refits, mended = refits_of(model, plan, batch, judge or second_text(read(model, batch)))
    if mended is not None:
        plan = plan.seen_on(*mended.texts)
    operation = Operation(plan, merged, mends, refits)
    pruned = stored.cut(model, operation)
    # If the cut had written into shared tensors, the gate would compare the fault with itself.
    plan.require_model(model.identity)
    return stored.write_cut(Path(target), CutModel(model, pruned, tokenizer, operation, batch, mended, alone))


def _require_held(stored: Format, decoder: Decoder, plan: PruningPlan, *, mend: bool) -> None:
    """Raise LyapunovPruneError, before anything is fitted, if the format cannot hold `plan`, or its mended gaps."""
    if mend:
        plan.require_gaps()
    if stored.card is None or (mend and not stored.mends):
        what = "a mended model, a plain checkpoint of fewer layers" if mend else "a pruned model"
        others = [name for name, known in formats_of("prune").items() if known.mends or not mend]
        raise LyapunovPruneError(f"format {stored.name} cannot store {what}; give one of {', '.join(others)}")
    stored.require_plan(decoder, plan)  # before parts are looked up, which a merged block does not have
    if isinstance(plan.gone, PartsGone) and plan.gone.reduction is not None:
        for layer in plan.gone.activation:
            require_reduction(plan.gone.reduction, find_feedforward(decoder.structure, layer))
