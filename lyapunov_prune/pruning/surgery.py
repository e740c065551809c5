"""The cut: a new model without the layers, sublayers, channels and experts that a plan names. `gate` checks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.masking import masked, masked_experts
from lyapunov_prune.mending.mend import Mend, mapped, store_mend
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.sharing import own, share_equal
from lyapunov_prune.models.units import Refits
from lyapunov_prune.models.wrappers import require_levels_stay, require_text_alone
from lyapunov_prune.pruning.edit import edit_of, filled
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import PartsGone
from lyapunov_prune.results.history import add_step


@dataclass(frozen=True, eq=False)
class Operation:
    """`plan`, one merged block for every activation that it drops, and the maps that close its gaps.

    `refits` are last matrices refitted to the kept channels, in the model's dtype, by the index of the kept layer and
    of the unit in it (`Decoder.units`).

    Raises LyapunovPruneError unless `merged` are the blocks whose activation the plan drops.
    """

    plan: PruningPlan
    merged: Sequence[Merged] = ()
    mends: Sequence[Mend] = ()
    refits: Refits = field(default_factory=dict)

    def __post_init__(self) -> None:
        given, gone = tuple(sorted(each.block.layer for each in self.merged)), self.plan.gone
        lost = gone.activation if isinstance(gone, PartsGone) else ()
        if given != lost:
            raise LyapunovPruneError(
                f"the plan drops the activations of layers {list(lost)}, but blocks are merged for {list(given)}; "
                "write the plan with export.write_pruned and a batch, which fits them"
            )

    def place(self, layer: int) -> int:
        """The index of the kept `layer` in the new model."""
        return self.plan.kept.index(layer)

    @property
    def computes(self) -> bool:
        """Whether the new model computes some products with matrices that are new or smaller, so rounding differs."""
        return bool(self.mends) or self.plan.drops_parts

    @contextmanager
    def standing_in(self, decoder: Decoder) -> Iterator[None]:
        """Within the block, `decoder` computes by hooks what the model made from it should compute.

        Parts aside that only a compact model can lack (`export.compact_gate.cut_by_hooks`).
        """
        skipping = skipped(decoder.structure, self.plan.remove)
        kept = dict(zip(self.plan.kept, self.plan.gone.kept_channels, strict=False))  # no channels if the plan has none
        narrower = masked(decoder, kept, self.refits)
        fewer = masked_experts(decoder, self.plan.gone.experts_gone)
        with mapped(decoder.layers, self.mends), fewer, skipping, narrower:
            yield


def cut(decoder: Decoder, operation: Operation, *, shared: bool = False) -> Decoder:
    """`without_parts` for the plan of `operation`; the layers before gaps absorb their maps. It is not checked yet."""
    pruned = without_parts(decoder, operation.plan, operation.refits, shared=shared)
    for index in {mend.place.layer for mend in operation.mends}:
        own(pruned.layers[operation.place(index)])
    for mend in operation.mends:
        store_mend(pruned.layers[operation.place(mend.place.layer)], mend)
    return pruned


def without_parts(
    decoder: Decoder, plan: PruningPlan, refits: Refits = MappingProxyType({}), *, shared: bool = False
) -> Decoder:
    """Make a new model without the parts that `plan` removes; it is not checked yet. `decoder` is untouched.

    One rule serves every decoder (`edit`): the config follows the plan, its class builds a model of it, and that gets
    the tensors that stay. `models/families.py` holds what a family needs beyond that. Hidden channels leave the
    matrices of blocks and experts (`models/width.py`), whose last ones become the `refits` (`Operation`). Experts leave
    with their rows of the router (`models/mixtures.py`). With `shared`, unchanged tensors share the memory of
    `decoder`; use it for a result that is only read and saved, because a later in-place change would affect both.

    `decoder` holds its plain weights (`models.plain`). Raises LyapunovPruneError for parts of layers that only a
    compact checkpoint can lack, experts that cannot be removed (`Mixtures.require`), a removal that the family's
    checkpoint format cannot express, and a decoder inside a multimodal model that text alone cannot judge.
    """
    plan.require_plain()
    if plan.gone.experts_gone:
        decoder.mixtures.require(plan.gone.experts_gone, plan.remove)
    with held(decoder.model):
        if decoder.wrapped:
            require_text_alone(decoder, plan.remove)
        pruned = filled(edit_of(decoder, plan), decoder, shared=shared)
    with torch.no_grad():
        for (layer, index), weight in refits.items():
            pruned.units[layer][index].out.weight(pruned.model).copy_(weight)
    add_step(pruned.model, "prune", plan.measured_on, decoder.model)
    return pruned


def share_memory(pruned: PreTrainedModel, original: Decoder, plan: PruningPlan) -> None:
    """Let the unchanged tensors of `pruned` share the memory of `original` (`models.sharing.share_equal`)."""
    named = original.model.named_parameters(remove_duplicate=False)
    twins = ((original.structure.renamed(name, plan.kept), parameter) for name, parameter in named)
    share_equal(pruned, {name: parameter for name, parameter in twins if name is not None})


def refusal(decoder: Decoder, remove: Sequence[int]) -> str | None:
    """Why no checkpoint can hold `decoder` without the layers `remove`; None if one can.

    Packed weights are not judged: None.
    """
    if decoder.packed:
        return None
    try:
        with quiet():
            if decoder.wrapped:
                require_levels_stay(decoder.model, tuple(remove))
            edit_of(decoder, PruningPlan.given(decoder, remove))
    except LyapunovPruneError as error:
        return str(error)
    return None
