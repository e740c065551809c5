"""AWQ: inputs that are large on calibration text are scaled up before rounding, so that they lose less."""

from __future__ import annotations

from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import Rounder
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import lift

GRID = 20
_LEAST = 1e-4  # least scale over their mean: an input that was always zero has a finite inverse


class AWQ(Rounder):
    """`Ŵ = Q(W diag(s)) diag(s)⁻¹` (m × n) with `s_j = (mean_t |x_tj|)^α`, `Q` the rounding of `rtn`.

    α is the one of `0, 1/20 … 19/20` with the least `‖(Ŵ − W) X‖_F²`, computed from the Gram matrix `X Xᵀ`. At α = 0 it
    is `rtn`, so the error is never larger. Lin et al., AWQ (MLSys 2024, arXiv:2306.00978), §3.2, without clipping of
    the grids.

    Each matrix has its own α. (AWQ uses one α for all matrices of an input, because it folds `diag(s)⁻¹` into the
    operation before it.) Here nothing is folded, and `Ŵ` is a dense matrix that integers and row scales cannot store.

    Float64, rounded once to the dtype of `W`. Raises LyapunovPruneError like `rtn`, and for statistics that are not a
    Gram matrix of n inputs.
    """

    help = "inputs are scaled by their size, then weights are rounded to nearest"
    reference = "Lin et al., MLSys 2024, arXiv:2306.00978, §3.2"
    needs = "magnitudes"
    on_grid = False

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        gram, magnitudes = self.needed(statistics)
        D = lift(W)
        G, size = damped(gram, 0, D.device), lift(magnitudes).to(D.device)
        size = (size / size.mean()).clamp_min(_LEAST)
        found, least = D, torch.inf
        for step in range(GRID):
            scaled = D * (scale := size ** (step / GRID))
            rounded = self.steps(scaled, amount).nearest(scaled) / scale
            error = float((((rounded - D) @ G) * (rounded - D)).sum())
            if error < least:
                found, least = rounded, error
        return found.to(W)
