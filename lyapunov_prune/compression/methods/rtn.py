"""Round to nearest: every weight moves to the nearest point of an even grid over the range of its row or group."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import Rounder
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, row_blocks


class RoundToNearest(Rounder):
    """Round `W` (m × n) to grids of `2^bits` points over the range of each row, or group of a row (`grids.stepped`).

    `|w − ŵ| ≤ s/2` for the step `s` of the grid, apart from one rounding to the dtype of `W`, except for large weights
    at 1.58 bits, which are cut off. 0 stays 0. Returns values on the grid, not packed integers. Nagel et al., A white
    paper on neural network quantization, 2021, §2.2.

    Raises LyapunovPruneError for `bits` outside `grids.WIDTHS` and for a group size that does not divide n.
    """

    help = "round to the nearest of 2^bits evenly spaced values"
    reference = "Nagel et al., 2021, arXiv:2106.08295, §2.2.1"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        blocks = row_blocks(W)
        return torch.cat([self.steps(rows, amount).nearest(lift(rows)).to(W) for rows in blocks])
