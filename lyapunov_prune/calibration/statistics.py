"""Calibration statistics of the inputs and outputs of one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over calibration tokens t for a matrix `y = W x` (m × n), float64 (not means). None: not collected.

    `a_t` is 1, or the weight of the token where tokens are weighted (`downstream.token_weights`). For an expert of a
    mixture the sums are over the tokens that the router sends it, and `a_t = w_t²` with the router's weight `w_t`,
    times the weight of the token at the output of all experts where tokens are weighted. `w_t` multiplies the expert's
    output, so an error `ΔW` of its last matrix moves the layer's output by `w_t ΔW x_t`: the sum of squares over tokens
    is `tr(ΔW (Σ w_t² x_t x_tᵀ) ΔWᵀ)`. An error of a matrix before the activation is multiplied by the same `w_t` on its
    way, after a derivative that is not known here and is taken to be alike for all tokens.

    - `norms` (n): `sqrt(Σ_t a_t x_tj²)`;
    - `gram` (n × n): `Σ_t a_t x_t x_tᵀ`;
    - `magnitudes` (n): `Σ_t √a_t |x_tj|`;
    - `drift` (n × n): `Σ_t a_t (x⁰_t − x_t) x_tᵀ`, with `x⁰` the input of the same matrix in the dense model;
    - `sensitivity` (m × m): `Σ_t g_t g_tᵀ` with `g_t = ∂⟨v, h⟩/∂y_t`, where `h` (tokens × d) is the output of the layer
      and `v ~ N(0, I)` of the same shape is drawn once per forward. In expectation over v this is `Σ_t Σ_s J_stᵀ J_st`
      with `J_st = ∂h_s/∂y_t`: how far the layer's output at every token s moves with the matrix's output at t. It does
      not depend on a loss. The router's weight is in `g_t` already;
    - `tokens`: how many tokens the router sent to the expert; None for a matrix that is no expert's. With fewer than n
      all sums also hold the first n tokens of the layer as the expert would treat them (`lending.Lender`), with the
      root mean square of the router's weights in the layer.
    """

    norms: torch.Tensor
    gram: torch.Tensor | None = None
    sensitivity: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    magnitudes: torch.Tensor | None = None
    tokens: int | None = None
