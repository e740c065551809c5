"""Weight-only pruning: Wanda's mask with the column norms of the weights in place of the inputs' norms."""

from __future__ import annotations

import torch

from lyapunov_prune.compression.masks import Pattern, row_mask
from lyapunov_prune.linalg import lift


def weight_only(W: torch.Tensor, sparsity: float, pattern: Pattern | None = None) -> torch.Tensor:
    """`W` (m × n) without the `round(sparsity · n)` entries of each row of smallest `|W_ij| ‖W_:j‖₂`.

    What *Structural Sensitivity in Compressed Transformers* (§6.1) calls simplified Wanda: weight × column norm, no
    calibration text. It is not Wanda, and removes other entries. Scores in float64; ties: the earlier entry goes.
    With `pattern` (keep, of) only the `keep` best of every `of` consecutive inputs of a row stay. `W` itself for a
    share that rounds to 0. Raises LyapunovPruneError for a pattern that does not fit the matrix or whose sparsity
    is another.
    """
    if pattern is None and round(sparsity * W.shape[1]) == 0:
        return W
    size = lift(W.detach()).abs()
    removed = row_mask(size * torch.linalg.vector_norm(size, dim=0), sparsity, pattern)
    return W.masked_fill(removed.to(W.device), 0)
