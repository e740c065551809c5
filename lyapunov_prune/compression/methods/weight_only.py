"""Weight-only pruning: Wanda's mask with the column norms of the weights in place of the inputs' norms."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import row_mask
from lyapunov_prune.compression.method import Sparsifier
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift


class WeightOnly(Sparsifier):
    """Zero the `round(amount · n)` entries of each row (m × n) of smallest `|W_ij| ‖W_:j‖₂`.

    *Structural Sensitivity in Compressed Transformers* (§6.1) calls it simplified Wanda: weight × column norm, no
    calibration text. It is not Wanda, and removes other entries. Scores in float64; among equal scores the earlier
    entry becomes zero. With `pattern` (keep, of) the `keep` best of every `of` consecutive inputs of a row stay. Raises
    LyapunovPruneError for a pattern that does not fit the matrix or has another sparsity.
    """

    help = "in each row the smallest |W_ij| ‖W_:j‖ become zero"
    reference = "structural sensitivity, §6.1: its simplified Wanda"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        if self.pattern is None and round(amount * W.shape[1]) == 0:
            return W
        size = lift(W).abs()
        removed = row_mask(size * torch.linalg.vector_norm(size, dim=0), amount, self.pattern)
        return W.masked_fill(removed.to(W.device), 0)
