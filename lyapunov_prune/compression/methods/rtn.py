"""Round to nearest: every weight moves to the nearest point of an even grid over the range of its row or group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lyapunov_prune.compression.method import Rounder
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, row_blocks

if TYPE_CHECKING:
    from lyapunov_prune.calibration.statistics import Statistics


@dataclass(frozen=True)
class RoundToNearest(Rounder):
    """`W` (m × n) on grids of `2^bits` points over the range of a row, or of a group of a row (`grids.stepped`).

    `|w − ŵ| ≤ s/2` for the step `s` of the grid (not at 1.58 bits, where large weights are cut off), beside one
    rounding to the dtype of `W`; 0 stays 0. The values of the grid come back, not packed integers. Nagel et al., A
    white paper on neural network quantization, 2021, §2.2.

    Raises LyapunovPruneError for `bits` that are none of `grids.WIDTHS` and for a group size that does not divide n.
    """

    name = "rtn"
    help = "round to the nearest of 2^bits even steps"
    reference = "Nagel et al., 2021, arXiv:2106.08295, §2.2.1"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        blocks = row_blocks(W.detach())
        return torch.cat([self.steps(rows, amount).nearest(lift(rows)).to(W) for rows in blocks])
