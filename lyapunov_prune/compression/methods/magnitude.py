"""Magnitude pruning: the smallest entries of a matrix become zero."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import row_mask
from lyapunov_prune.compression.method import Sparsifier
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import smallest


class Magnitude(Sparsifier):
    """Zero the `amount` share of the entries of smallest magnitude; among equal entries the earlier one becomes zero.

    Exactly `round(amount · numel)` entries become zero. Any float dtype. With `pattern` (keep, of) the `keep` largest
    of every `of` consecutive inputs of a row stay. Raises LyapunovPruneError for a pattern that does not fit the matrix
    or has another sparsity.
    """

    help = "the smallest entries become zero"
    reference = "Han et al., NeurIPS 2015, arXiv:1506.02626"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        if self.pattern is not None:
            return W.masked_fill(row_mask(W.abs(), amount, self.pattern), 0)
        count = round(amount * W.numel())
        return W.masked_fill(smallest(W.abs(), count), 0) if count else W
