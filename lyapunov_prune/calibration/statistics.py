"""What calibration text says about the inputs and outputs of one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over calibration tokens t for a matrix `y = W x` (m × n), float64.

    `norms` (n): `‖x_j‖₂` over the tokens. `gram` (n × n): `Σ_t x_t x_tᵀ`. `sensitivity` (m × m): `Σ_t g_t g_tᵀ`, `g`
    the derivative of the loss by `y`. None: not collected.
    """

    norms: torch.Tensor
    gram: torch.Tensor | None = None
    sensitivity: torch.Tensor | None = None
