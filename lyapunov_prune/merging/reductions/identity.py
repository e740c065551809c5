"""Reduction `identity`: the activation becomes the identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.merging.reduction import HiddenMap, Reduction

if TYPE_CHECKING:
    from lyapunov_prune.calibration.blocks import BlockSums
    from lyapunov_prune.models.feedforward import BlockParts


class Identity(Reduction):
    """`τ(x) = W₁ x + b₁`."""

    help = "the activation is replaced by the identity"
    reference = "boundary depth pruning"
    blocks = ("plain",)

    def map(self, parts: BlockParts, sums: BlockSums | None) -> HiddenMap:
        from lyapunov_prune.models.feedforward import lifted

        return HiddenMap(*lifted(parts.up))
