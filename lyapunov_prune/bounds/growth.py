"""How an error grows along one trajectory, and what the theorems on growth allow, in one or two phases (estimates)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.bounds.bound_check import BoundCheck, Numbers, as_array
from lyapunov_prune.bounds.checkers import lyapunov_contraction_bound, residual_growth_contraction, trajectory_error_le


@dataclass(frozen=True)
class TwoPhases:
    """A corollary of `trajectory_error_le`, derived on paper (docs/proofs.md), for the relative error `r_n`.

    From `r_{n+1} ≤ G_n r_n + δ_n`, with `G_n ≤ before` for the first `split` of N layers, `G_n ≤ behind` for the others
    and every `δ_n ≤ added`:

    `r_N ≤ behind^(N−split) (before^split r_0 + added S_split(before)) + added S_(N−split)(behind)`, where
    `S_m(x) = 1 + x + … + x^(m−1)`.

    `split` is the one that makes this `bound` smallest. `one_phase` is the same with the largest factor for all layers,
    and `error` the measured `r_N`. Factors are measured along one trajectory, so both bounds are estimates. `first` is
    the layer at which the count begins.
    """

    first: int
    split: int
    before: float
    behind: float
    added: float
    bound: float
    one_phase: float
    error: float

    def line(self) -> str:
        """The bound in one sentence."""
        grows = f"Relative error {self.error:.3g} after the last layer, bound in two phases {self.bound:.3g}"
        if not self.bound < self.one_phase:
            return f"{grows}, no less than in one (factor {self.behind:.3g} everywhere)"
        return (
            f"{grows}: factors at most {self.before:.3g} before layer {self.first + self.split} and {self.behind:.3g} "
            f"from it on; in one phase {self.one_phase:.3g}, {self.one_phase / self.bound:.3g} times as much"
        )


def two_phases(errors: Numbers, growth: Numbers, local: Numbers, *, first: int = 0) -> TwoPhases:
    """The split with the smallest bound: `errors` r (N + 1,), `growth` G (N,) and `local` δ (N,), all relative.

    Raises LyapunovPruneError if their lengths do not match.
    """
    trajectory_error_le(errors, growth, local)  # checks the lengths
    r, G, delta = as_array(errors), as_array(growth), as_array(local)
    added, count = float(delta.max(initial=0.0)), len(G)
    found = []
    for split in range(count + 1):
        before, behind = (float(part.max(initial=0.0)) for part in (G[:split], G[split:]))
        bound = float(r[0])
        with np.errstate(over="ignore"):
            for n in range(count):
                bound = (before if n < split else behind) * bound + added
        found.append((bound, split, before, behind))
    bound, split, before, behind = min(found)
    return TwoPhases(first, split, before, behind, added, bound, found[0][0], float(r[-1]))


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
        """`two_phases` of the relative error from the end of layer 0 on, before which it may be zero.

        None for one layer.
        """
        if len(self.local) < 2:
            return None
        relative, factors = np.sqrt(self.error / self.size), self.factors * np.sqrt(self.size[:-1] / self.size[1:])
        return two_phases(relative[1:], factors[1:], np.sqrt(self.local / self.size[1:])[1:], first=1)
