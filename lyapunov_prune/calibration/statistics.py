"""Calibration statistics of the inputs and outputs of one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over calibration tokens t for a matrix `y = W x` (m × n), float64 (not means). None: not collected.

    `a_t` is 1, or the weight of the token where tokens are weighted (`downstream.token_weights`).

    - `norms` (n): `sqrt(Σ_t a_t x_tj²)`;
    - `gram` (n × n): `Σ_t a_t x_t x_tᵀ`;
    - `magnitudes` (n): `Σ_t |x_tj|`;
    - `drift` (n × n): `Σ_t a_t (x⁰_t − x_t) x_tᵀ`, with `x⁰` the input of the same matrix in the dense model;
    - `sensitivity` (m × m): `Σ_t g_t g_tᵀ` with `g_t = ∂⟨v, h⟩/∂y_t`, where `h` (tokens × d) is the output of the layer
      and `v ~ N(0, I)` of the same shape is drawn once per forward. In expectation over v this is `Σ_t Σ_s J_stᵀ J_st`
      with `J_st = ∂h_s/∂y_t`: how far the layer's output at every token s moves with the matrix's output at t. It does
      not depend on a loss.
    """

    norms: torch.Tensor
    gram: torch.Tensor | None = None
    sensitivity: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    magnitudes: torch.Tensor | None = None
