"""Calibration statistics of the inputs and outputs of one matrix."""

from __future__ import annotations

from dataclasses import dataclass

from lyapunov_prune.lazy import torch


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums (not means) over calibration tokens t for a matrix `y = W x` (m × n), float64; None: not collected.

    `a_t` is 1, or the token's weight if tokens are weighted (`downstream.token_weights`), or `1/‖y_t‖²` if an error is
    taken relative to the output (0 where the output is 0). For an expert, the sums are
    over the tokens that the router sends to it, and `a_t = w_t²` with the router's weight `w_t`; if tokens are
    weighted, times the token's weight at the summed output of the experts. `w_t` multiplies the expert's output, so an
    error `ΔW` of its last matrix moves the layer's output by `w_t ΔW x_t`: the sum of squares over tokens is `tr(ΔW (Σ
    w_t² x_t x_tᵀ) ΔWᵀ)`. An error before the activation is also multiplied by `w_t`, and by a derivative that is
    unknown here and assumed to be the same for all tokens.

    - `norms` (n): `sqrt(Σ_t a_t x_tj²)`;
    - `gram` (n × n): `Σ_t a_t x_t x_tᵀ`;
    - `magnitudes` (n): `Σ_t √a_t |x_tj|`;
    - `drift` (n × n): `Σ_t a_t (x⁰_t − x_t) x_tᵀ`, with `x⁰` the input of the same matrix in the dense model;
    - `sensitivity` (m × m): `Σ_t g_t g_tᵀ` with `g_t = ∂⟨v, h⟩/∂y_t`, where `h` (tokens × d) is the output of the layer
      and `v ~ N(0, I)` of the same shape is drawn once per forward. Its expectation over v is `Σ_t Σ_s J_stᵀ J_st` with
      `J_st = ∂h_s/∂y_t`: how far the layer's output at every token s moves with the matrix's output at t. It does not
      depend on a loss. For experts, `g_t` already contains the router's weight;
    - `tokens`: the number of tokens that the router sent to the expert; None if the matrix is not an expert's. If it is
      below n, all sums but the drift also include the first n − `tokens` tokens of the layer, run through the expert
      (`lending.Lender`) with the root mean square of the router's weights in the layer.
    """

    norms: torch.Tensor
    gram: torch.Tensor | None = None
    sensitivity: torch.Tensor | None = None
    drift: torch.Tensor | None = None
    magnitudes: torch.Tensor | None = None
    tokens: int | None = None
