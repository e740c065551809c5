"""AlphaPruning: layers with heavier-tailed spectra stay denser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from lyapunov_prune.allocation.schedule import SPARSEST, Schedule
from lyapunov_prune.arguments import Range
from lyapunov_prune.errors import LyapunovPruneError, named
from lyapunov_prune.lazy import np, torch
from lyapunov_prune.linalg import lift
from lyapunov_prune.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


def hill(eigenvalues: np.ndarray) -> float:
    """Hill estimate of the exponent α of a density `∝ λ^−α` from `n` samples.

    `α = 1 + k / Σ_{i=1..k} ln(λ_{n−i+1} / λ_{n−k})` with `λ_1 ≤ … ≤ λ_n` and `k = ⌊n / 2⌋`: the upper half relative to
    the largest sample below it. Lu et al., AlphaPruning (NeurIPS 2024), PL_Alpha_Hill.

    Raises LyapunovPruneError for fewer than two samples, a λ_{n−k} that is not positive, and an upper half without
    spread.
    """
    ascending = np.sort(np.asarray(eigenvalues, dtype=np.float64))
    n = len(ascending)
    k = n // 2
    positive = n > 1 and ascending[n - k - 1] > 0
    logs = float(np.log(ascending[n - k :] / ascending[n - k - 1]).sum()) if positive else 0.0
    if not (np.isfinite(logs) and logs > 0):
        raise LyapunovPruneError(
            "these eigenvalues have no tail: it needs two or more, the upper half positive, finite and not equal; use "
            "another schedule"
        )
    return 1 + k / logs


class AlphaPruning(Schedule):
    """Sparsity increases with the tail exponent of the layer: a lighter tail (larger α) indicates less training.

    `s_l = η · (1 − τ + 2τ (α_l − min α) / (max α − min α))`, with `α_l` the mean of `hill` over the eigenvalues of
    `WᵀW` of the matrices of layer l, and η such that the mean is the budget. Matrices of one row or column have no tail
    and do not count. Equal exponents give equal sparsities. Lu et al., AlphaPruning (NeurIPS 2024), §3.2. Computes all
    singular values of every matrix in float64, which no other schedule needs.

    Raises LyapunovPruneError for τ outside `[0, 1)`, a budget that no η meets inside `0 … 0.99`, and a matrix of which
    half the singular values vanish or are equal.
    """

    tau: Annotated[float, Range(0, 1, below=True)] = 0.3

    help = "layers whose spectra have heavier tails are kept denser"
    reference = "Lu et al., NeurIPS 2024, arXiv:2410.10912, §3.2"

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        from lyapunov_prune.allocation.fitting import fit

        alpha = tail_exponents(model, matrices)
        span = alpha.max() - alpha.min()
        place = (alpha - alpha.min()) / span if span > 0 else np.full_like(alpha, 0.5)
        amount = fit(1 - self.tau + 2 * self.tau * place, matrices.sizes, budget, high=SPARSEST)
        return amount, {"tau": self.tau}


def tail_exponents(model: PreTrainedModel, matrices: Matrices) -> np.ndarray:
    """`α_l` of the layer of every matrix, (M,) float64."""
    from lyapunov_prune.models.projections import weights_of

    exponents = np.zeros(len(matrices.sizes))
    counts = np.zeros(len(matrices.sizes))
    for i, (p, stored) in enumerate(weights_of(model, track(matrices.projections, "spectra"))):
        W = lift(stored.detach())
        if min(W.shape) < 2:
            continue
        values = torch.linalg.svdvals(W).cpu().numpy()
        # Singular values below this are float64 rounding; their tail would describe noise.
        noise = values.max() * max(W.shape) * np.finfo(np.float64).eps
        with named(p.name):
            exponents[i] = hill(np.where(values > noise, values, 0) ** 2)
        counts[i] = 1
    total = matrices.layer_sum(counts)
    if not total.all():
        layer = int(matrices.layers[np.argmin(total)])
        raise LyapunovPruneError(f"no matrix of layer {layer} has a tail; use another schedule")
    return matrices.layer_sum(exponents) / total
