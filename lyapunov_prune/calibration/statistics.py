"""What calibration text says about the inputs and outputs of one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over calibration tokens t for a matrix `y = W x` (m × n), float64, not divided by their number.

    `norms` (n): `‖x_j‖₂` over the tokens. `gram` (n × n): `Σ_t x_t x_tᵀ`. `sensitivity` (m × m): `Σ_t g_t g_tᵀ`, where
    `g_t = ∂⟨v, h⟩/∂y_t`, `h` (tokens × d) is the output of the layer that the matrix is in, and `v ~ N(0, I)` of the
    shape of `h` is drawn once a forward. No loss has a part in it: in expectation over v this is `Σ_t Σ_s J_stᵀ J_st`,
    `J_st = ∂h_s/∂y_t`, how far the layer's output moves, at every token s, with the matrix's at t. None: not collected.
    """

    norms: torch.Tensor
    gram: torch.Tensor | None = None
    sensitivity: torch.Tensor | None = None
