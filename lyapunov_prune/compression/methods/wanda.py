"""Wanda: in every row the entries that matter least on calibration text become zero."""

from __future__ import annotations

import torch

from lyapunov_prune.compression.masks import Pattern, row_mask
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, row_blocks


def wanda(W: torch.Tensor, input_norms: torch.Tensor, sparsity: float, pattern: Pattern | None = None) -> torch.Tensor:
    """`W` (m × n) without the `round(sparsity · n)` entries of each row of smallest `|W_ij| ‖x_j‖₂`.

    `input_norms` (n, float64) are the norms of the input features over calibration tokens. Sun et al., A simple
    and effective pruning approach for large language models (ICLR 2024), eq. 1. Ties: the earlier entry goes.
    With `pattern` (keep, of) only the `keep` best of every `of` consecutive inputs of a row stay. `W` itself for a
    share that rounds to 0. Raises LyapunovPruneError for norms of another length, and for a pattern that does not
    fit the matrix or whose sparsity is another.
    """
    if input_norms.shape != W.shape[1:]:
        raise LyapunovPruneError(f"{len(input_norms)} input norms for a matrix with {W.shape[1]} columns")
    if pattern is None and round(sparsity * W.shape[1]) == 0:
        return W
    norms = lift(input_norms)
    removed = [
        row_mask((size := lift(rows).abs()) * norms.to(size.device), sparsity, pattern)
        for rows in row_blocks(W.detach())
    ]
    return W.masked_fill(torch.cat(removed).to(W.device), 0)
