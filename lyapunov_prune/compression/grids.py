"""Uniform grids that weights are rounded to, one per row of a matrix or per group of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, row_blocks, widen

TERNARY = 1.58  # three values, log2 3 bits
WIDTHS = (TERNARY, *range(2, 9))
_LEAST, _SHARES = 0.7, 13  # steps from this share of the widest one up, so many of them


class Steps(NamedTuple):
    """The grids of a matrix (m × n): points `scale · q` for integers `low ≤ q ≤ high`, (m × groups) float64 each."""

    scale: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def integers(self, W: torch.Tensor) -> torch.Tensor:
        """The q of the points nearest to the entries of `W` (m × n, float64)."""
        q = (W.reshape(*self.scale.shape, -1) / self.scale.unsqueeze(-1)).round()
        q = q.clamp(self.low.unsqueeze(-1), self.high.unsqueeze(-1)).view(W.shape)
        return q + 0.0  # turns −0 into 0, because files are compared bit by bit

    def nearest(self, W: torch.Tensor) -> torch.Tensor:
        """The points nearest to the entries of `W` (m × n, float64)."""
        q = self.integers(W).view(*self.scale.shape, -1)
        return (q * self.scale.unsqueeze(-1)).view(W.shape)

    def of_column(self) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """`nearest` for one column (m,) of a group, with few kernels."""
        scale, low, high = (part.T.contiguous().unbind() for part in self)

        def nearest(group: int, v: torch.Tensor) -> torch.Tensor:
            q = (v / scale[group]).round_().clamp_(low[group], high[group]).add_(0.0)  # no −0, as in `integers`
            return q.mul_(scale[group])

        return nearest


class Grid(NamedTuple):
    """A rounded matrix as it is stored: `integers` (m × n, int8), and `scale` (m × groups) in the dtype of W."""

    integers: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """`ŵ = s q` (m × n) in the dtype of the scale, rounded once."""
        m, groups = self.scale.shape
        scale = self.scale.unsqueeze(-1).expand(m, groups, self.integers.shape[1] // groups).reshape(m, -1)
        pairs = zip(row_blocks(self.integers), row_blocks(scale), strict=True)
        return torch.cat([(lift(q) * lift(s)).to(scale) for q, s in pairs])


def gridded(W: torch.Tensor, after: torch.Tensor, steps_of: Callable[[torch.Tensor], Steps]) -> Grid:
    """The points nearest to `after`, of the shape of W, on the grids that `steps_of` gives the rows of W."""
    parts = []
    for rows, left in zip(row_blocks(W), row_blocks(after), strict=True):
        steps = steps_of(rows)
        parts.append(Grid(steps.integers(lift(left)).to(torch.int8), steps.scale.to(W.dtype)))
    return Grid(*(torch.cat(part) for part in zip(*parts, strict=True)))


def stepped(W: torch.Tensor, bits: float, group_size: int | None, symmetric: bool) -> Steps:
    """Grids of `2^bits` points over the range of each row of `W` (m × n), or of each `group_size` inputs of a row.

    By default `s = (max − min)/(2^bits − 1)` and `q` goes from `−z` to `2^bits − 1 − z` with `z = round(−min/s)`, for a
    range that is widened to hold 0 (Nagel et al., A white paper on neural network quantization, 2021, §2.2.1). With
    `symmetric` the grid lies around 0 and needs no zero point: `s = 2 max|w| / (2^bits − 1)` and `q` goes from
    `−2^(bits−1)` to `2^(bits−1) − 1`, so that the ends of the range lie halfway between two points (§2.2.2, on the same
    range). This s is rounded up to the dtype of `W`: rounded down, the clamp would cut off the largest weights. In both
    cases the nearest point is within `s/2` of `w`.

    At `TERNARY` bits the points are `−s, 0, s` with `s = mean |w|`, with or without `symmetric` (Ma et al., The era of
    1-bit LLMs, 2024, arXiv:2402.17764, eq. 1 to 3); entries beyond `1.5 s` are more than `s/2` from the nearest point.

    `bits` is one of `WIDTHS`. Raises LyapunovPruneError for a group size that does not divide n.
    """
    if bits == TERNARY:
        scale = grouped(W, group_size).abs().mean(2)
        one = torch.ones_like(scale)
        return Steps(scale.where(scale > 0, one), -one, one)
    groups, top = grouped(W, group_size), 2 ** int(bits) - 1
    if symmetric:
        half = torch.full(groups.shape[:2], float((top + 1) // 2), dtype=groups.dtype, device=groups.device)
        return Steps(rounded_up(2 * groups.abs().amax(2) / top, W.dtype), -half, half - 1)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scale = (high - low) / top
    scale = scale.where(scale > 0, 1)  # all zero: any scale will do
    zero = (-low / scale).round()
    return Steps(scale, -zero, top - zero)


def fitted(W: torch.Tensor, bits: int, group_size: int | None, importance: torch.Tensor) -> Steps:
    """The symmetric grids of `stepped` with steps that leave the least `Σ_j c_j (w_j − s q_j)²` in every group.

    `importance` (n,) are the `c_j`. The steps tried are shares of that of `stepped`, from `_LEAST` of it up: a shorter
    one cuts off the largest weights and rounds the others less. Errors are summed in float32, or float64 for such W.
    """
    widest = stepped(W, bits, group_size, symmetric=True)
    groups = widen(W).view(len(W), -1, group_size or W.shape[1])
    columns, half = importance.to(groups).view(1, *groups.shape[1:]), 2 ** (bits - 1)
    best, left = widest.scale, torch.full_like(widest.scale, torch.inf)
    for share in torch.linspace(_LEAST, 1, _SHARES, dtype=torch.float64).tolist():
        scale = rounded_up(share * widest.scale, W.dtype)
        step = scale.to(groups).unsqueeze(-1)
        moved = (groups / step).round_().clamp_(-half, half - 1).mul_(step).sub_(groups)
        error = moved.square_().mul_(columns).sum(2).to(left)
        best, left = torch.where(error < left, scale, best), torch.minimum(error, left)
    return widest._replace(scale=best)


def grouped(W: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """`W` (m × n) in float64 as m × groups × `group_size`. Raises LyapunovPruneError if that does not divide n."""
    m, n = W.shape
    require_groups(group_size, n)
    return lift(W.detach()).reshape(m, -1, group_size or n)


def require_groups(group_size: int | None, n: int) -> None:
    """Raise LyapunovPruneError unless a row of `n` inputs divides into groups of this size."""
    if group_size is not None and (group_size < 1 or n % group_size):
        raise LyapunovPruneError(f"groups of {group_size} do not fit {n} inputs; give a divisor of {n}")


def rounded_up(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest number of `dtype` that is at least `exact` (float64), or 1 if it is 0; returned in float64."""
    scale = exact.to(dtype)
    scale = torch.where(lift(scale) < exact, scale.nextafter(torch.full_like(scale, torch.inf)), scale)
    return lift(scale.where(scale > 0, 1))
