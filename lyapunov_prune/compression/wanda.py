"""Wanda: in every row the entries that matter least on calibration text become zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.compression.masks import Pattern, row_mask
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift, token_energy
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
    whose inputs cannot be seen.
    """
    batch = as_batch(model, batch)
    fused = next((p.name for p in projections if p.expert is not None), None)
    if fused:
        raise LyapunovPruneError(f"the inputs of {fused} are not seen outside its fused forward; use method magnitude")
    sums: dict[str, torch.Tensor] = {}

    def summing(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            energy = token_energy(x.T).cpu()
            sums[name] = sums[name] + energy if name in sums else energy

        return hook

    structure = find_structure(model)
    modules = {p.module for p in projections}
    handles = [model.get_submodule(name).register_forward_pre_hook(summing(name)) for name in modules]
    try:
        for row in track(batch.ids, "calibration"):
            run_backbone(structure, row[None])
    finally:
        for handle in handles:
            handle.remove()
    unseen = next((p.name for p in projections if p.module not in sums), None)
    if unseen:
        raise LyapunovPruneError(f"{unseen} took no part in the calibration forward; give more text")
    if not np.isfinite([float(s.sum()) for s in sums.values()]).all():
        raise LyapunovPruneError("NaN or infinite activations in the calibration; check the weights")
    return {p.name: sums[p.module].sqrt() for p in projections}
