"""Magnitude pruning: the smallest entries of a matrix become zero."""

from __future__ import annotations

import torch

from lyapunov_prune.compression.masks import Pattern, row_mask, smallest


def sparsify(W: torch.Tensor, sparsity: float, pattern: Pattern | None = None) -> torch.Tensor:
    """`W` without the `sparsity` share of its entries of smallest magnitude; ties go first come, first served.

    Exactly `round(sparsity · numel)` entries become zero. Any float dtype; `W` itself for a share that rounds to 0.
    With `pattern` (keep, of) only the `keep` largest of every `of` consecutive inputs of a row stay. Raises
    LyapunovPruneError for a pattern that does not fit the matrix or whose sparsity is another.
    """
    if pattern is not None:
        return W.masked_fill(row_mask(W.abs(), sparsity, pattern), 0)
    count = round(sparsity * W.numel())
    return W.masked_fill(smallest(W.abs(), count), 0) if count else W
