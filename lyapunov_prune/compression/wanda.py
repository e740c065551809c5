"""Wanda: in every row the entries that matter least on calibration text become zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.compression.gathering import Gathering, require_seen
from lyapunov_prune.compression.masks import Pattern, row_mask
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.progress import track
from lyapunov_prune.text import TokenBatch, as_batch
from lyapunov_prune.tracing import run_backbone


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
    size = lift(W.detach()).abs()
    removed = row_mask(size * lift(input_norms).to(size.device), sparsity, pattern)
    return W.masked_fill(removed.to(W.device), 0)


@in_eval_mode
@torch.no_grad()
def input_norms(
    model: PreTrainedModel, batch: TokenBatch | torch.Tensor, projections: Sequence[Projection]
) -> dict[str, torch.Tensor]:
    """`‖x_j‖₂` over all tokens of `batch`, for each feature j that enters each of `projections`, by its name.

    Float64, from one forward of the model as it is. Raises LyapunovPruneError for experts that a family fuses,
    whose inputs cannot be seen, for a matrix that no token reached, and for activations that are not finite.
    """
    batch = as_batch(model, batch)
    require_seen(projections)
    structure, gathering = find_structure(model), Gathering(model, projections, "norms")
    with gathering.watching():
        for row in track(batch.ids, "calibration"):
            run_backbone(structure, row[None])
    return {name: statistics.norms.cpu() for name, statistics in gathering.found().items()}
