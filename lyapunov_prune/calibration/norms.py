"""Norms of the inputs of every matrix over a calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from lyapunov_prune.calibration.gathering import Gathering
from lyapunov_prune.forward.hooks import run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.models.decoder import wrap
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import track


@in_eval_mode
def input_norms(model: PreTrainedModel, batch: Readable, projections: Sequence[Projection]) -> dict[str, torch.Tensor]:
    """`‖x_j‖₂` over all tokens of `batch`, for each input feature j of each of `projections`, by name.

    In float64, from one forward of the model. Tokens of an expert are weighted by the router (`Statistics`). Raises
    LyapunovPruneError for a matrix that no token reaches, and for activations that are not finite.
    """
    reading = read(wrap(model), batch)
    gathering = Gathering(model, projections, "norms")
    with gathering.watching():
        for ids in track(reading.windows(1), "calibration"):
            run_backbone(reading.structure, ids)
    found = gathering.statistics(partial(layer_held, model))
    return {name: statistics.norms.cpu() for name, statistics in found.items()}
