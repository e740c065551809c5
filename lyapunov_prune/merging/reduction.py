"""The base class of reductions, which replace the hidden vector of a feed-forward block by a linear map."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lyapunov_prune.lazy import torch
from lyapunov_prune.registry import Choice

if TYPE_CHECKING:
    from lyapunov_prune.calibration.blocks import BlockSums
    from lyapunov_prune.models.feedforward import BlockParts


@dataclass(frozen=True, eq=False)
class HiddenMap:
    """`τ(x) = T x + t`, float64: `weight` is T (hidden × d), `bias` is t (hidden,) or None for zero."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Reduction(Choice):
    """A linear map for a hidden vector. A reduction is a subclass in a file of its own and a row in `table.REDUCTIONS`.

    `blocks` are the kinds of block it applies to, "plain", "gated" or both; `needs` names sums of
    `calibration.blocks.SUMS`.
    """

    blocks: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def map(self, parts: BlockParts, sums: BlockSums | None) -> HiddenMap:
        """The map for a block, from the sums named by `needs`.

        Raises LyapunovPruneError for fewer tokens than a fit has unknowns.
        """


class GateConstant(Reduction):
    """A reduction that puts a constant in the place of a gate after its activation."""

    blocks = ("gated",)

    @abstractmethod
    def constant(self, sums: BlockSums) -> torch.Tensor:
        """c (hidden,), float64."""

    def map(self, parts: BlockParts, sums: BlockSums | None) -> HiddenMap:
        assert sums is not None
        return gated_by(parts, self.constant(sums))


def gated_by(parts: BlockParts, c: torch.Tensor) -> HiddenMap:
    """`τ(x) = c ⊙ (W_u x + b_u)`."""
    from lyapunov_prune.models.feedforward import lifted

    W, b = lifted(parts.up)
    return HiddenMap(c.unsqueeze(-1) * W, None if b is None else c * b)
