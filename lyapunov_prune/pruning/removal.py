"""Remove layers and sublayers in memory: cut, and check before the model is handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from lyapunov_prune.data.batch import Tokens
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.mending.mend import fit_mends
from lyapunov_prune.mending.refit import judged_refits
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.decoder import Decoder, takes_model
from lyapunov_prune.models.families import TRUSTED
from lyapunov_prune.models.plain import Plain, PlainText
from lyapunov_prune.models.units import Refits
from lyapunov_prune.pruning.plan import PruningPlan, as_plan
from lyapunov_prune.pruning.removal_gate import check_removal
from lyapunov_prune.pruning.surgery import Operation, cut, without_parts


@takes_model
def remove_layers(model: PlainText, plan: PruningPlan | Sequence[int]) -> PreTrainedModel:
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
    if decoder.wrapped or decoder.structure.model_type not in TRUSTED:
        report = check_removal(decoder, pruned, operation)
        if not report.passed:
            raise LyapunovPruneError(
                f"these parts of {type(decoder.model).__name__} cannot be removed correctly: {report.failure()}; "
                f"{operation.plan.remedy}"
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
        decoder = without_parts(decoder, replace(plan, channels=(), widths=()), shared=True)
    return judged_refits(decoder, plan.kept_channels, batch, judge)
