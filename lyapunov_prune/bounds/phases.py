"""A bound in two phases: the error grows by at most one factor up to a layer, and by at most another behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lyapunov_prune.bounds.bound_check import Numbers, as_array
from lyapunov_prune.bounds.checkers import trajectory_error_le


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


def relative_phases(size: np.ndarray, error: np.ndarray, growth: np.ndarray, local: np.ndarray) -> TwoPhases | None:
    """`two_phases` of the relative error from the end of layer 0 on, before which it may be zero; None for one layer.

    `size` and `error` (L + 1,) are the energies `Σ‖h_k‖²` and `Σ‖e_k‖²`, `local` (L,) that of the local errors;
    `growth` (L,) is that of the norm.
    """
    if len(growth) < 2:
        return None
    relative, factors = np.sqrt(error / size), growth * np.sqrt(size[:-1] / size[1:])
    return two_phases(relative[1:], factors[1:], np.sqrt(local / size[1:])[1:], first=1)


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
