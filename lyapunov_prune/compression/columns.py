"""Wanda by columns that errors enter: Lyapunov column-weighted scoring.

One of the within-layer schemes that structural sensitivity, §7, names, and says of all that none helped. Its formula
did not survive; this one is ours: the weight of an input feature is the relative error that a disturbance before layer
0 has become there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.calibration.gathering import require_seen
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.calibration.streaming import stream
from lyapunov_prune.compression.wanda import wanda
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import residual_stream, run_backbone
from lyapunov_prune.forward.reading import Readable, read
from lyapunov_prune.linalg import feature_energy, widen
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import Projection, find_projections
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.profiles.propagation import direction
from lyapunov_prune.progress import track


@in_eval_mode
@torch.no_grad()
def column_errors(model: PreTrainedModel, batch: Readable, *, epsilon: float = 1e-2) -> dict[str, torch.Tensor]:
    """`c_j = ‖e_j‖₂ / ‖x_j‖₂` over all tokens, for every feature j that enters each matrix, by its name: (n,) float64.

    `x` enters the matrix of the model as it is, `x + e` where every token before layer 0 is moved by `ε ‖h_0,t‖ u_t`
    (`profiles.propagation.direction`), both in one forward of twice the rows. 0 for a feature that is always 0.

    Raises LyapunovPruneError for an epsilon that is not positive and for fused experts, whose inputs cannot be seen.
    """
    if not epsilon > 0:
        raise LyapunovPruneError(f"epsilon {epsilon:g} disturbs nothing; give more than 0")
    reading = read(model, batch)
    projections = find_projections(model)
    require_seen(projections)
    modules = {p.module: model.get_submodule(p.module) for p in projections}
    clean, error = ({name: torch.zeros(()) for name in modules} for _ in range(2))

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x, moved = (widen(rows.reshape(-1, rows.shape[-1])) for rows in args[0].chunk(2))
            clean[name] = clean[name].to(x.device) + feature_energy(x)
            error[name] = error[name].to(x.device) + feature_energy(moved - x)

        return hook

    for window, ids in enumerate(track(reading.windows(1), "errors of columns")):

        def inject(hidden: torch.Tensor, window: int = window) -> torch.Tensor:
            x = widen(hidden[:1])
            return torch.cat([hidden[:1], (x + epsilon * direction(x, window, seed=0)).to(hidden.dtype)])

        with (
            residual_stream(reading.structure, lambda layer, hidden: None, inject),
            hooked(before=[(module, watch(name)) for name, module in modules.items()]),
        ):
            run_backbone(reading.structure, ids.repeat(2, 1))
    return {
        p.name: torch.where(clean[p.module] > 0, error[p.module] / clean[p.module], 0).sqrt().cpu() for p in projections
    }


@in_eval_mode
@torch.no_grad()
def column_weighted(
    model: PreTrainedModel, batch: Readable, allocation: Allocation, *, strength: float = 1.0
) -> PreTrainedModel:
    """A copy without the entries of each row of smallest `|W_ij| ‖x_j‖ c_j^strength`, as many as `allocation` says.

    `c` is `column_errors` of the dense model; `‖x_j‖` is of the model compressed so far, as in `compress`. At strength
    0 this is Wanda. Every row keeps the sparsity of its matrix, so every layer its own.

    Raises LyapunovPruneError for an allocation of another model or not of sparsity, and as `column_errors` does.
    """
    allocation.require_model(model)
    if allocation.unit != "sparsity":
        raise LyapunovPruneError(f"an allocation of {allocation.unit}; give one of sparsity")
    reading = read(model, batch)
    weights = column_errors(model, reading)
    small = copy.deepcopy(model)

    def change(here: Sequence[Projection], statistics: Mapping[str, Statistics]) -> None:
        for p in here:
            norms = statistics[p.name].norms
            W = p.weight(small)
            W.copy_(wanda(W, norms * weights[p.name].to(norms) ** strength, allocation.of(p.name)))

    stream(small, reading, find_projections(small), "norms", change)
    return small
