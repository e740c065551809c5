"""Magnitude pruning: the smallest entries of a matrix become zero."""

from __future__ import annotations

import torch


def sparsify(W: torch.Tensor, sparsity: float) -> torch.Tensor:
    """`W` without the `sparsity` share of its entries of smallest magnitude; ties go first come, first served.

    Exactly `round(sparsity · numel)` entries become zero. Any float dtype; `W` itself for a share that rounds to 0.
    """
    count = round(sparsity * W.numel())
    if count == 0:
        return W
    size = W.abs().flatten()
    limit = size.kthvalue(count).values
    removed = size < limit
    ties = (size == limit).nonzero().flatten()[: count - int(removed.sum())]
    removed[ties] = True
    return W.masked_fill(removed.view(W.shape), 0)
