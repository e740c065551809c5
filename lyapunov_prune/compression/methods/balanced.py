"""Balanced truncation of a matrix, by how far its inputs reach and how much its outputs move the layer.

A state-space model is balanced by two Gramians, which solve Lyapunov equations of its dynamics (Moore, Principal
component analysis in linear systems, IEEE TAC 26, 1981; Glover, All optimal Hankel-norm approximations, Int. J. Control
39, 1984). A matrix `y = W x` has no dynamics, so there is no Lyapunov equation to solve, and its Gramians are measured.
Controllability is `P = Σ_t x_t x_tᵀ` (n × n), how far the inputs reach. Observability is `Q = Σ_t g_t g_tᵀ` (m × m),
how much the outputs move the layer's output `h` (and not the loss): `g_t` is the derivative of `⟨v, h⟩` with respect to
`y_t`, for a random `v ~ N(0, I)` (`calibration.statistics`).
"""

from __future__ import annotations

from lyapunov_prune.calibration.gram import damped, leading, root, scaled
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.methods.whitened_svd import WhitenedSVD
from lyapunov_prune.lazy import torch


class Balanced(WhitenedSVD):
    """`argmin ‖Q^½ (W − Ŵ) P^½‖_F` over `Ŵ` (m × n) of rank `amount`: `Q^{-½} [Q^½ W P^½]_r P^{-½}`.

    P (n × n) is the `gram` of the statistics, Q (m × m) their `sensitivity`, float64 in any scale; to each
    `damping · mean(diag) · I` is added. With `[M]_r = U_r U_rᵀ M` this is `Q^{-½} U_r U_rᵀ Q^½ W`. The error in that
    norm is `sqrt(Σ_{i>r} σ_i²)` of the Hankel values `σ(Q^½ W P^½)`: the tail that balanced truncation drops (Moore
    1981; optimal here by Eckart and Young).

    Float64, rounded once to the dtype of `W`, which leaves singular values of the size of that rounding beyond the
    rank. Raises LyapunovPruneError unless P is a Gram matrix of n inputs and Q one of m outputs.
    """

    help = "lower rank, with outputs weighted by their effect on the layer"
    reference = "Moore, IEEE TAC 26, 1981, with Gramians that are measured"
    needs = "sensitivity"

    def truncated(self, D: torch.Tensor, rank: int, statistics: Statistics | None) -> torch.Tensor:
        gram, sensitivity = self.needed(statistics)
        A = root(scaled(damped(sensitivity, self.damping, D.device))[0])
        U = leading(A @ D, damped(gram, self.damping, D.device), rank)
        return torch.linalg.solve(A, U) @ (U.T @ A @ D)
