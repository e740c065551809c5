"""Round to nearest: every weight moves to the nearest point of an even grid over the range of its row or group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lyapunov_prune.compression.method import Method
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, row_blocks

if TYPE_CHECKING:
    from lyapunov_prune.calibration.statistics import Statistics


class Grid(NamedTuple):
    """A rounded matrix as it can be stored: `integers` (m × n, int8), `scale` (m × groups) in the dtype of W."""

    integers: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """`ŵ = s q` (m × n), rounded once, to the dtype of the scale."""
        m, groups = self.scale.shape
        scale = self.scale.unsqueeze(-1).expand(m, groups, self.integers.shape[1] // groups).reshape(m, -1)
        pairs = zip(row_blocks(self.integers), row_blocks(scale), strict=True)
        return torch.cat([(lift(q) * lift(s)).to(scale) for q, s in pairs])


@dataclass(frozen=True)
class RoundToNearest(Method):
    """`W` (m × n) on grids of `2^bits` points, one of every row or of `group_size` inputs of a row.

    `ŵ = s (clamp(round(w/s) + z, 0, 2^bits − 1) − z)` with `s = (max − min)/(2^bits − 1)`, `z = round(−min/s)`, the
    range widened to hold 0, which stays 0 (Nagel et al., A white paper on neural network quantization, 2021, §2.2.1).
    `|w − ŵ| ≤ s/2`, beside one rounding to the dtype of `W`. The values of the grid come back, not packed integers.
    With `symmetric` the grids are those of `symmetric_grid`.

    Raises LyapunovPruneError for `bits` outside 2 … 8 and for a group size that does not divide n.
    """

    group_size: int | None = None
    symmetric: bool = False

    name = "rtn"
    help = "round to the nearest of 2^bits even steps"
    reference = "Nagel et al., 2021, arXiv:2106.08295, §2.2.1"
    unit = "bits"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        bits = int(amount)
        if self.symmetric:
            return symmetric_grid(W, bits, self.group_size).values()
        return torch.cat([_rounded(rows, bits, self.group_size) for rows in row_blocks(W.detach())])


def _rounded(W: torch.Tensor, bits: int, group_size: int | None) -> torch.Tensor:
    groups, top = _groups(W, bits, group_size)
    low = groups.amin(1, keepdim=True).clamp_max(0)
    high = groups.amax(1, keepdim=True).clamp_min(0)
    scale = (high - low) / top
    scale = scale.where(scale > 0, 1)  # all zero: any scale will do
    zero = (-low / scale).round()
    grid = ((groups / scale).round() + zero).clamp(0, top) - zero
    return (grid * scale).view(W.shape).to(W)


def symmetric_grid(W: torch.Tensor, bits: int, group_size: int | None = None) -> Grid:
    """`W` (m × n) on grids around 0, which need no zero point, as integers and scales.

    `q = clamp(round(w/s), −2^(bits−1), 2^(bits−1) − 1)` with `s = 2 max|w| / (2^bits − 1)`, rounded up to the dtype of
    `W`: down, the clamp would cut the largest weights short. `|w − s q| ≤ s/2` with the scale as it is stored; the ends
    of the range lie halfway between two points (Nagel et al., §2.2.2, on the range of `RoundToNearest`).

    Raises as `RoundToNearest` does.
    """
    grids = [_grid(rows, bits, group_size) for rows in row_blocks(W.detach())]
    return Grid(*(torch.cat(parts) for parts in zip(*grids, strict=True)))


def _grid(W: torch.Tensor, bits: int, group_size: int | None) -> Grid:
    groups, top = _groups(W, bits, group_size)
    exact = 2 * groups.abs().amax(1, keepdim=True) / top
    scale = exact.to(W.dtype)
    scale = torch.where(lift(scale) < exact, scale.nextafter(torch.full_like(scale, torch.inf)), scale)
    scale = scale.where(scale > 0, 1)
    half = (top + 1) // 2
    integers = (groups / lift(scale)).round().clamp(-half, half - 1)
    return Grid(integers.to(torch.int8).view(W.shape), scale.view(len(W), -1))


def _groups(W: torch.Tensor, bits: int, group_size: int | None) -> tuple[torch.Tensor, int]:
    """What shares a grid, a row each, in float64, and the number of its steps."""
    if bits not in range(2, 9):
        raise LyapunovPruneError(f"{bits} bits; give a whole number from 2 to 8")
    n = W.shape[1]
    if group_size is not None and (group_size < 1 or n % group_size):
        raise LyapunovPruneError(f"groups of {group_size} do not fit {n} inputs; give a divisor of {n}")
    return lift(W).reshape(-1, group_size or n), 2 ** int(bits) - 1
