"""What is removed from a model and what replaces it: one record for the surgery and its gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.forward.masking import masked, masked_experts
from lyapunov_prune.forward.sublayers import silenced
from lyapunov_prune.mending.mend import Mend, mapped
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.merging.replaced import hidden_replaced
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.units import Refits
from lyapunov_prune.pruning.plan import PruningPlan


@dataclass(frozen=True, eq=False)
class Operation:
    """`plan`, one merged block for every activation that it drops, and the maps that close its gaps.

    `refits` are last matrices refitted to the kept channels, in the model's dtype, by the index of the kept layer and
    of the unit in it (`models.units.find_units`).

    Raises LyapunovPruneError unless `merged` are the blocks whose activation the plan drops.
    """

    plan: PruningPlan
    merged: Sequence[Merged] = ()
    mends: Sequence[Mend] = ()
    refits: Refits = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = tuple(sorted(each.block.layer for each in self.merged))
        if given != self.plan.drop_activation:
            raise LyapunovPruneError(
                f"the plan drops the activations of layers {list(self.plan.drop_activation)}, but merged blocks are "
                f"given for {list(given)}; a reduction is fitted on a text: write the plan with export.write_pruned "
                "and a batch"
            )

    def place(self, layer: int) -> int:
        """The index of the kept `layer` in the new model."""
        return self.plan.kept.index(layer)

    @property
    def computes(self) -> bool:
        """Whether the new model computes some products with matrices that are new or smaller, so rounding differs."""
        return bool(self.merged or self.mends or self.plan.channels or self.plan.experts_gone)

    @contextmanager
    def standing_in(self, decoder: Decoder) -> Iterator[None]:
        """Within the block, `decoder` computes by hooks what the model made from it should compute."""
        silent = silenced(decoder, self.plan.drop_attention, self.plan.drop_mlp)
        replaced = hidden_replaced(decoder.layers, [(each.block, each.tau) for each in self.merged])
        skipping = skipped(decoder.structure, self.plan.remove)
        kept = dict(zip(self.plan.kept, self.plan.kept_channels, strict=False))  # no channels if the plan has none
        narrower = masked(decoder, kept, self.refits)
        fewer = masked_experts(decoder, self.plan.experts_gone)
        with silent, replaced, mapped(decoder.layers, self.mends), fewer, skipping, narrower:
            yield
