"""Wanda: in every row the entries that matter least on calibration text become zero."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import row_mask
from lyapunov_prune.compression.method import Sparsifier
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift, row_blocks


class Wanda(Sparsifier):
    """Zero the `round(amount · n)` entries of each row (m × n) of smallest `|W_ij| ‖x_j‖₂`.

    `‖x_j‖₂` (n, float64) are the norms of the input features over calibration tokens. Sun et al., A simple and
    effective pruning approach for large language models (ICLR 2024), eq. 1. Among equal scores the earlier entry
    becomes zero. With `pattern` (keep, of) the `keep` best of every `of` consecutive inputs of a row stay. Raises
    LyapunovPruneError for a pattern that does not fit the matrix or has another sparsity.
    """

    help = "in each row the smallest |W_ij| ‖x_j‖ become zero"
    reference = "Sun et al., ICLR 2024, arXiv:2306.11695, eq. 1"
    needs = "norms"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        if self.pattern is None and round(amount * W.shape[1]) == 0:
            return W
        (norms,) = map(lift, self.needed(statistics))
        removed = [
            row_mask((size := lift(rows).abs()) * norms.to(size.device), amount, self.pattern) for rows in row_blocks(W)
        ]
        return W.masked_fill(torch.cat(removed).to(W.device), 0)
