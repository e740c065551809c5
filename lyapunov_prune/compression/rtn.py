"""Round to nearest: every weight moves to the nearest point of an even grid between its row's extremes."""

from __future__ import annotations

import torch

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift


def round_to_nearest(W: torch.Tensor, bits: int, group_size: int | None = None) -> torch.Tensor:
    """`W` (m × n) on asymmetric grids of `2^bits` points, one of every row or of `group_size` inputs of a row.

    `ŵ = s (clamp(round(w/s) + z, 0, 2^bits − 1) − z)` with `s = (max − min)/(2^bits − 1)`, `z = round(−min/s)`, the
    range widened to hold 0, which stays 0 (Nagel et al., A white paper on neural network quantization, 2021, §2.2.1).
    `|w − ŵ| ≤ s/2`, beside one rounding to the dtype of `W`. The values of the grid come back, not packed integers.

    Raises LyapunovPruneError for `bits` outside 2 … 8 and for a group size that does not divide n.
    """
    if bits not in range(2, 9):
        raise LyapunovPruneError(f"{bits} bits; give a whole number from 2 to 8")
    m, n = W.shape
    if group_size is not None and (group_size < 1 or n % group_size):
        raise LyapunovPruneError(f"groups of {group_size} do not fit {n} inputs; give a divisor of {n}")
    groups = lift(W.detach()).reshape(-1, group_size or n)
    top = 2 ** int(bits) - 1
    low = groups.amin(1, keepdim=True).clamp_max(0)
    high = groups.amax(1, keepdim=True).clamp_min(0)
    scale = (high - low) / top
    scale = scale.where(scale > 0, 1)  # all zero: any scale will do
    zero = (-low / scale).round()
    grid = ((groups / scale).round() + zero).clamp(0, top) - zero
    return (grid * scale).view(m, n).to(W)
