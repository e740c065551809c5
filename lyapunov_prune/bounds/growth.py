"""How an error grows along one trajectory, and what the theorems on growth allow (estimates)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.checkers import lyapunov_contraction_bound, residual_growth_contraction, trajectory_error_le
from lyapunov_prune.bounds.phases import TwoPhases, relative_phases


@dataclass(frozen=True)
class ErrorGrowth:
    """Sums over all tokens of two trajectories through L layers, as one vector; float64.

    With `h_k` and `h'_k` the exact and the approximated state before layer k, `f_k` and `g_k` the layers: `size` and
    `error` (L + 1,) are `Σ‖h_k‖²` and `Σ‖h_k − h'_k‖²`, `stretched` (L,) is `Σ‖f(h_k) − f(h'_k)‖²`, and `local` (L,) is
    `Σ‖f(h'_k) − g(h'_k)‖²`. `unit` is the relative rounding of their roots.
    """

    size: np.ndarray
    error: np.ndarray
    stretched: np.ndarray
    local: np.ndarray
    unit: float

    @property
    def factors(self) -> np.ndarray:
        """`K_k = ‖f(h_k) − f(h'_k)‖ / ‖h_k − h'_k‖`, (L,); 0 where there is no error yet."""
        error, stretched = np.sqrt(self.error[:-1]), np.sqrt(self.stretched)
        return np.divide(stretched, error, out=np.zeros_like(stretched), where=error > 0)

    @property
    def gamma(self) -> float:
        """`γ = max_k K_k ‖h_k‖ / ‖h_{k+1}‖`, the largest growth factor of the relative error over the layers."""
        return float((self.factors * np.sqrt(self.size[:-1] / self.size[1:])).max())

    def composition(self) -> tuple[BoundCheck, ...]:
        """The error after each layer against the composed bound, with measured growth."""
        return trajectory_error_le(np.sqrt(self.error), self.factors, np.sqrt(self.local), unit=self.unit)

    def contraction(self) -> tuple[BoundCheck, ...]:
        """Theorems 9 and 8 on the relative error `r_k = ‖h_k − h'_k‖ / ‖h_k‖`, with measured factors.

        Theorem 9: one check for each layer where the error, including the layer's own, grows less than the state (`K +
        δ/‖e‖`), so that `r` must fall. Theorem 8: one check from the end of layer 0 on (no error enters layer 0), if
        `gamma` is below one.
        """
        relative, state = self.error / self.size, self.size[1:] / self.size[:-1]
        reached = np.sqrt(self.stretched) + np.sqrt(self.local)
        growth = np.divide(reached**2, self.error[:-1], out=np.full_like(reached, np.inf), where=self.error[:-1] > 0)
        checks = residual_growth_contraction(relative, growth, state, unit=self.unit)
        if self.gamma < 1 and len(state) > 1:
            added = float(np.sqrt(self.local / self.size[1:])[1:].max())
            checks += (lyapunov_contraction_bound(np.sqrt(relative[1:]), self.gamma, added, unit=self.unit),)
        return checks

    def phases(self) -> TwoPhases | None:
        """The bound in two phases on the relative error."""
        return relative_phases(self.size, self.error, self.factors, self.local)
