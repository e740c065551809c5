"""How large the inputs of every matrix are over a calibration text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import Gathering, require_seen
from lyapunov_prune.data.batch import TokenBatch, as_batch
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.structure import find_structure, in_eval_mode
from lyapunov_prune.progress import track


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
