"""Remove layers and sublayers in memory, and put what is made through the gate before it is handed out.

The gate of a removal checks four things of every result:

1. Its logits are those of the original in which hooks skip the same layers and sublayers, mend gaps and keep
   experts from being chosen.
2. Decoding step by step with a cache gives the logits of the uncached forward.
3. Saved and reloaded with plain transformers it is the same model: same keys, same logits, same settings
   in every layer.
4. The counts of layers, parameters and bytes on disk fell by exactly what was removed.

A model that reads images is also checked with one in the prompt. If channels are removed, every number that stays must
be the original's.

Merged and mended matrices, read from the new model, are checked one by one against the bound of `merge_rounding`. How
far logits move when each number of a matrix is rounded once depends on the model: SmolLM2-135M with seven merged blocks
amplifies float32 rounding beyond the limit for two equal computations. So their logits get the wider limit for two ways
to compute the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck
from lyapunov_prune.data.batch import Tokens
from lyapunov_prune.data.examples import Examples, as_examples
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.mending.mend import Mend, fit_mends, products
from lyapunov_prune.mending.refit import judged_refits
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.merging.merge import merge_rounding
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.models.decoder import Decoder, InMemory, Model, takes_model, wrap
from lyapunov_prune.models.feedforward import Affine, lifted
from lyapunov_prune.models.pictures import picture_logits, picture_prompt, reads_pictures
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.units import Refits
from lyapunov_prune.models.width import find_width
from lyapunov_prune.pruning.counting import COUNTED, count_check, leaving
from lyapunov_prune.pruning.edit import edit_of
from lyapunov_prune.pruning.gate import CACHED, PICTURED, SKIPPED, Check, Gate, GateReport, bytes_in, crashed
from lyapunov_prune.pruning.plan import PruningPlan, as_plan
from lyapunov_prune.pruning.removed import ChannelsGone, ExpertsGone, LayersGone
from lyapunov_prune.pruning.surgery import Operation, cut, without_parts


@takes_model
def remove_layers(model: Plain, plan: PruningPlan | Sequence[int]) -> PreTrainedModel:
    """A new model without the layers of `plan` (or a plain list of indices); `model` is untouched.

    `surgery.without_parts` describes the cut. The result saves with `save_pretrained` and loads with plain
    transformers. A family that the tests have not judged is first put through the gate on random tokens
    (`verify_removal` is the full gate, with your text). So is every decoder inside a multimodal model, whose other
    parts are copied as they are.

    Raises LyapunovPruneError for a bad plan, a plan for another model, a removal that the family's checkpoint
    format cannot express, a decoder that fails the gate, and a model that is not its plain weights (adapters,
    quantised weights).
    """
    operation = Operation(as_plan(model, plan))
    return _proven(model, without_parts(model, operation.plan), operation)


def _proven(decoder: Decoder, pruned: Decoder, operation: Operation) -> PreTrainedModel:
    """The model that `operation` makes of `decoder`, if it needs no gate or passes it."""
    if decoder.wrapped or not decoder.structure.trusted:
        report = check_removal(decoder, pruned, operation)
        if not report.passed:
            raise LyapunovPruneError(
                f"these parts of {type(decoder.model).__name__} cannot be removed correctly: {report.failure()}; "
                f"{operation.plan.gone.remedy}"
            )
    return pruned.model


@takes_model
def mend(model: Plain, plan: PruningPlan | Sequence[int], batch: Tokens) -> PreTrainedModel:
    """Remove layers as `remove_layers` does, and close the gaps without training (`mending.mend`).

    On `batch`, the linear map is fitted that brings the state before each gap nearest to the output of the removed
    layers. The layer before the gap absorbs it into one of its matrices: no parameter is added, and plain transformers
    loads the result.

    Raises as `remove_layers` and `mending.mend.fit_mends`, and for a plan that drops parts of layers.
    """
    plan = as_plan(model, plan)
    plan.require_gaps()
    mends, report = fit_mends(model, plan.remove, batch)
    operation = Operation(plan.seen_on(report.measured_on), mends=mends)
    return _proven(model, cut(model, operation), operation)


def refits_of(decoder: Decoder, plan: PruningPlan, batch: Tokens, judge: Tokens | None) -> tuple[Refits, MendReport]:
    """Refit the last matrices of the kept layers to the kept channels of `plan`; none if that does not pay.

    Takes and raises what `mending.refit.judged_refits` does.
    """
    if plan.remove:
        decoder = without_parts(decoder, replace(plan, gone=LayersGone(plan.remove)), shared=True)
    return judged_refits(decoder, plan.gone.kept_channels, batch, judge)


COPIED = "channels are the original's"


@takes_model
def verify_removal(
    original: InMemory,
    pruned: Model,
    plan: PruningPlan | Sequence[int],
    batch: Tokens | None = None,
    *,
    checkpoint: str | Path | None = None,
    mends: Sequence[Mend] = (),
) -> GateReport:
    """Put `pruned` through the four checks on random tokens and on the start of `batch`.

    `mends` are the maps that it was mended by: they are put on the original by hooks, and a fifth check holds the
    parameters of `pruned` that took them against the products (`merged_check`).

    `checkpoint` is a folder where `pruned` has been saved; without it the model is saved to a temporary
    folder. Long enough inputs are used to roll over sliding windows of up to 1,024 tokens. Raises
    LyapunovPruneError for a plan made for another model.
    """
    operation = Operation(as_plan(original, plan), mends=mends)
    try:
        result = wrap(pruned)
    except LyapunovPruneError as error:  # the result is no decoder
        return GateReport((crashed(RELOADED, error),))
    examples = None if batch is None else as_examples(original, batch)
    return check_removal(original, result, operation, examples, checkpoint)


@in_eval_mode
def check_removal(
    original: Decoder,
    pruned: Decoder,
    operation: Operation,
    batch: Examples | None = None,
    checkpoint: str | Path | None = None,
) -> GateReport:
    """`verify_removal` for a model made by `operation`."""
    goes = leaving(original, edit_of(original, operation.plan))
    gate, checks = removal_gate(original, pruned, operation, batch, goes.shares)

    def counted(folder: Path) -> GateCheck:
        return count_check(goes, pruned, bytes_in(folder))

    return gate.report(checks, {RELOADED: gate.reloads, COUNTED: counted}, checkpoint)


def removal_gate(
    original: Decoder, pruned: Decoder, operation: Operation, batch: Examples | None, shares: Mapping[str, Fraction]
) -> tuple[Gate, dict[str, Check]]:
    """The gate of a removal of these `shares` (`counting.shares_leaving`), and its checks that need no files."""
    folded = bool(operation.plan.remove) and original.family.changes(original.structure.config)
    computed = operation.computes or folded  # the family's weights hold what depends on the layer's number
    gate = Gate(original, pruned, sample_inputs(original, batch), operation.standing_in, computed, batch)
    checks: dict[str, Check] = {SKIPPED: partial(_same, gate, operation), CACHED: gate.cached}
    if original.wrapped or reads_pictures(original.model):
        checks[PICTURED] = partial(_same_with_picture, gate, shares)
    if operation.mends:
        checks[MERGED] = partial(_within_rounding, gate, operation)
    if isinstance(operation.plan.gone, ChannelsGone):
        checks[COPIED] = partial(_copied, gate, operation)
    return gate, checks


def _same(gate: Gate, operation: Operation) -> GateCheck:
    """Whether the logits agree. If maps, masks or routers fail in half precision, float32 copies decide.

    In float32 only the stored weights are rounded, while in half precision rounding alone may choose other experts.
    """
    plan = operation.plan
    masked = {ChannelsGone: ["channels masked"], ExpertsGone: ["experts masked"]}.get(type(plan.gone), [])
    goes = ["layers skipped", *masked] if plan.remove or not masked else masked
    detail = f"logits against the original with the {' and '.join(goes)}"
    found = gate.same(detail)
    if not found.passed and operation.computes and (wide := gate.in_float32()):
        again = wide.same(f"{detail}, in float32 ({found.measured:.2g} in {gate.result.model.dtype})")
        return replace(again, passed=again.measured <= gate.limit, limit=gate.limit)
    return found


def _same_with_picture(gate: Gate, shares: Mapping[str, Fraction]) -> GateCheck:
    """Whether everything outside the layers is unchanged, and the logits agree with an image in the prompt."""
    original, after = gate.reference.model, gate.result.model.state_dict()
    for name, tensor in original.state_dict().items():
        outside = gate.reference.structure.layer_of(name) is None
        if outside and shares.get(name) == 0 and not torch.equal(after[name], tensor):
            return GateCheck(PICTURED, False, float("inf"), gate.limit, f"{name} lies outside the layers and changed")
    detail = "all weights outside the layers"
    prompt = picture_prompt(original)
    if prompt is None:
        return GateCheck(PICTURED, True, 0.0, gate.limit, f"{detail}; no picture fits into a prompt")
    with gate.standing_in(gate.reference):
        expected = picture_logits(original, prompt)
    return gate.pictured(prompt, expected, f"logits with a picture in the prompt, and {detail}")


def _within_rounding(gate: Gate, operation: Operation) -> GateCheck:
    layers, made = gate.reference.layers, gate.result.layers
    rows = []
    for mend in operation.mends:
        i = mend.place.layer
        rows += [(i, *product) for product in products(layers[i], made[operation.place(i)], mend)]
    return merged_check(rows, "a mended matrix")


def _copied(gate: Gate, operation: Operation) -> GateCheck:
    """Whether the units hold the numbers of the kept channels, in order, or the refitted ones."""
    before, after, differ = gate.reference, gate.result, 0
    olds, news = find_width(before).units, after.units
    for i, (layer, kept) in enumerate(zip(operation.plan.kept, operation.plan.gone.kept_channels, strict=True)):
        for j, (old, new, channels) in enumerate(zip(olds[layer], news[i], kept, strict=True)):
            if old is None or channels is None:
                continue
            refit = operation.refits.get((i, j))
            entries = zip(old.indices(channels), new.indices(channels), strict=True)
            for (entry, index), (made, _) in entries:
                wide, slim = (e.read(decoder.model) for decoder, e in ((before, entry), (after, made)))
                wanted = wide.index_select(entry.axis, index.to(wide.device))
                if refit is not None and (entry.module, entry.key) == (old.out.module, old.out.parameter):
                    wanted = refit.to(slim).T if entry.axis == 0 else refit.to(slim)
                differ += int((wanted != slim).sum()) if wanted.shape == slim.shape else max(1, slim.numel())
    return GateCheck(COPIED, not differ, differ, 0.0, "numbers of the blocks that are not those of the channels kept")


MERGED = "merged within rounding"
_INPUTS = 8


@torch.no_grad()
def merged_check(rows: Iterable[tuple[int, Affine, HiddenMap, Affine]], what: str) -> GateCheck:
    """Whether `W x + b = W_out τ(x) + b_out` on random inputs x, in float64, up to the rounding of W and b.

    Each row holds the layer, `(W_out, b_out)`, τ, and the stored `(W, b)`.
    """
    worst, layer = 0.0, -1
    for index, out, tau, merged in rows:
        (W, b), wide = lifted(merged), lifted(out)
        x = torch.randn(_INPUTS, W.shape[1], dtype=W.dtype, generator=torch.Generator().manual_seed(index)).to(W.device)
        h = tau(x)
        error = (linear(h, *wide) - linear(x, W, b)).norm(dim=-1).cpu().numpy()
        sizes = x.norm(dim=-1).cpu().numpy(), h.norm(dim=-1).cpu().numpy()
        beyond = float((error / merge_rounding(out, tau, merged, *sizes)).max())
        if not beyond <= worst:
            worst, layer = beyond, index
    detail = f"error of {what} over what rounding allows, most in layer {layer}"
    return GateCheck(MERGED, worst <= 1, worst, 1.0, detail)
