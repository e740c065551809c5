"""Schedules of the papers that chapter 3 compares with those of the package: each makes an Allocation."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.bits_kl import halves
from lyapunov_prune.allocation.allocation import Allocation, Matrices
from lyapunov_prune.allocation.fitting import SPAN, fit, shift
from lyapunov_prune.allocation.schedule import SPARSEST
from lyapunov_prune.allocation.schedules.atp import steepest
from lyapunov_prune.calibration.gathering import input_norms
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.projections import weights_of
from lyapunov_prune.models.roles import role
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.sensitivity.sensitivity import Sensitivity

Budget = Literal["equal-error", "downstream"]


def atp_search(
    model: PreTrainedModel, budget: float, calibration: TokenBatch, *, method: str = "wanda", trials: int = 9
) -> Allocation:
    """`atp` at the β of least loss among `β_k = k/T · min(2S, 2(1 − S)) / (L − 1)`, `k = 1 … T`, T the `trials`.

    Each trial is compressed by `method` on the first half of the windows of `calibration`, and scored on the second.
    The smaller β wins a tie. Huang et al., ICML 2025, arXiv:2502.14770, reimplemented from its description.
    """
    seen, unseen = halves(calibration)
    largest = steepest(budget, Matrices.of(model).model.num_layers)
    tried = [lp.allocate(model, "atp", budget, beta=float(b)) for b in np.linspace(0, largest, trials + 1)[1:]]
    losses = []
    for allocation in tried:
        try:
            small = lp.compress(model, seen, method=method, allocation=allocation).model
            losses.append(lp.perplexity(small, unseen).nll)
        except lp.NonFiniteError:  # a broken model: search on
            losses.append(np.inf)
    best = tried[int(np.argmin(losses))]
    parameters: dict[str, float | str] = {"trials": float(trials), **best.parameters}
    on = calibration.measured_on(model)
    return replace(best, schedule="atp-search", parameters=parameters, measured_on=(on,))


def owl(
    model: PreTrainedModel, budget: float, calibration: TokenBatch, *, outlier: float = 5.0, width: float = 0.08
) -> Allocation:
    """Sparsity decreases with the layer's share of outliers `D_l`; the paper's M is `outlier`, its λ `width`.

    `D_l` is the share of the scores `|W_ij| ‖x_j‖₂` of all matrices of layer l that exceed M × their mean over the
    layer. `s_l` is linear in `D_l` with `max s − min s = 2λ` and mean `S`, the budget; equal shares give equal
    sparsities. Yin et al., ICML 2024, arXiv:2310.05175, §3.2.
    """
    matrices = Matrices.of(model)
    norms = input_norms(model, calibration, matrices.projections)
    counts: list[int] = []
    for _, layer in groupby(matrices.projections, lambda p: p.layer):
        scores = [lift(p.weight(model).detach()).abs() * norms[p.name] for p in layer]
        limit = outlier * sum(float(s.sum()) for s in scores) / sum(s.numel() for s in scores)
        counts += [int((s > limit).sum()) for s in scores]
    D = matrices.layer_sum(np.array(counts)) / matrices.layer_sum(matrices.sizes)
    span = D.max() - D.min()
    target = -2 * width * (D - D.min()) / span if span > 0 else np.zeros_like(D)
    amount = shift(target, matrices.sizes, budget, high=SPARSEST)
    on = calibration.measured_on(model)
    return matrices.allocated("owl", budget, amount, {"outlier": outlier, "width": width}, (on,))


def alpha_pruning(model: PreTrainedModel, budget: float, *, tau: float = 0.3) -> Allocation:
    """Sparsity increases with the tail exponent of the layer: a lighter tail (larger α) indicates less training.

    `s_l = η · (1 − τ + 2τ (α_l − min α) / (max α − min α))`, with `α_l` the mean of `hill` over the eigenvalues of
    `WᵀW` of the matrices of layer l, and η such that the mean is the budget. Matrices of one row or column have no tail
    and do not count. Lu et al., NeurIPS 2024, arXiv:2410.10912, §3.2.
    """
    matrices = Matrices.of(model)
    exponents, counts = np.zeros((2, len(matrices.sizes)))
    for i, (_, stored) in enumerate(weights_of(model, matrices.projections)):
        W = lift(stored.detach())
        if min(W.shape) > 1:
            values = torch.linalg.svdvals(W).cpu().numpy()
            # Singular values below this are float64 rounding; their tail would describe noise.
            noise = values.max() * max(W.shape) * np.finfo(np.float64).eps
            exponents[i], counts[i] = hill(np.where(values > noise, values, 0) ** 2), 1
    alpha = matrices.layer_sum(exponents) / matrices.layer_sum(counts)
    span = alpha.max() - alpha.min()
    place = (alpha - alpha.min()) / span if span > 0 else np.full_like(alpha, 0.5)
    amount = fit(1 - tau + 2 * tau * place, matrices.sizes, budget, high=SPARSEST)
    return matrices.allocated("alpha-pruning", budget, amount, {"tau": tau})


def hill(eigenvalues: np.ndarray) -> float:
    """Hill estimate of the exponent α of a density `∝ λ^−α` from `n` samples (Lu et al., PL_Alpha_Hill).

    `α = 1 + k / Σ_{i=1..k} ln(λ_{n−i+1} / λ_{n−k})` with `λ_1 ≤ … ≤ λ_n` and `k = ⌊n / 2⌋`: the upper half relative to
    the largest sample below it. Raises LyapunovPruneError where this half has no spread, or begins at zero.
    """
    ascending = np.sort(np.asarray(eigenvalues, dtype=np.float64))
    n = len(ascending)
    k = n // 2
    logs = float(np.log(ascending[n - k :] / ascending[n - k - 1]).sum()) if ascending[n - k - 1] > 0 else 0.0
    if not (np.isfinite(logs) and logs > 0):
        raise LyapunovPruneError("these eigenvalues have no tail; use another schedule")
    return 1 + k / logs


def guidelines(
    model: PreTrainedModel,
    budget: float,
    *,
    ceiling: float | Sensitivity = 0.9,
    extra: float = 0.1,
    protected: int = 2,
) -> Allocation:
    """The three rules of structural sensitivity, §6.4 ("Practical compression guidelines").

    - The MLP input matrices (gate, up) of the first `protected` layers stay dense.
    - Keys and values get `extra` more sparsity than the rest.
    - No sparsity exceeds `ceiling`, the catastrophe threshold s* of the model: a number, or the `Sensitivity` that
      measured it (`measure_sensitivity`, study `threshold`).

    All matrices except the protected ones are shifted together until the mean is the budget. The paper gives the rules
    in words; the values of `extra` and `protected` are ours. Raises LyapunovPruneError when the budget is above the
    ceiling, and for a measurement without s*.
    """
    matrices = Matrices.of(model)
    most, on = (ceiling, ()) if isinstance(ceiling, float) else _threshold(ceiling)
    roles = np.array([role(p.component) for p in matrices.projections])
    kept = (roles == "mlp-in") & (matrices.layers < protected)
    target = np.where(np.isin(roles, ("key", "value")), extra, 0.0)
    amount = shift(target, matrices.sizes, budget, high=np.where(kept, 0.0, most))
    return matrices.allocated(
        "guidelines", budget, amount, {"ceiling": most, "extra": extra, "protected": protected}, on
    )


def _threshold(found: Sensitivity) -> tuple[float, tuple[MeasuredOn, ...]]:
    if found.threshold is None:
        raise LyapunovPruneError("no sparsity kept the regret below the limit: there is no s*")
    return found.threshold, tuple(on for on in (found.calibrated_on, found.measured_on) if on is not None)


def lyapunov(
    model: PreTrainedModel, budget: float, profile: ContractionProfile, *, least: float = 0.8, most: float = 1.2
) -> Allocation:
    """The schedule of least error at the output under a quadratic model of the error.

    Minimises `Σ_l w_l A_l s_l²`, where `w_l` is the sum of `‖W‖_F²` over the matrices of layer l and `A_l = Π_{k > l}
    ρ_k`, subject to `Σ_l n_l s_l = S Σ_l n_l` and `least · S ≤ s_l ≤ min(most · S, 0.99)`, with `n_l` the number of
    entries of layer l and `S` the budget. The minimum is `s_l = clip(c n_l / (w_l A_l))`, with `c` from the budget.
    Structural sensitivity, §6.4 and Appendix E, where all layers have the same size and `n_l` cancels. The true error
    grows more slowly than s², so the formula without bounds is too steep (same place), and the paper clamps it. Its
    bounds are not given; these defaults are ours.
    """
    matrices = Matrices.of(model)
    squares = [float(lift(W.detach()).square().sum()) for _, W in weights_of(model, matrices.projections)]
    w = matrices.layer_sum(np.array(squares))
    logs = np.log(matrices.layer_sum(matrices.sizes)) - np.log(w) - log_amplification(profile)[matrices.layers]
    high = min(most * budget, SPARSEST)
    amount = fit(_exponentials(logs), matrices.sizes, budget, low=min(least * budget, high), high=high)
    return matrices.allocated("lyapunov", budget, amount, {"least": least, "most": most}, (profile.measured_on,))


def lyapunov_budget(
    model: PreTrainedModel, budget: float, profile: ContractionProfile, *, reading: Budget = "equal-error"
) -> Allocation:
    """`s_l ∝ √τ_l`, with `τ` the share of the error that layer l may add: its energy grows as the square of s.

    By `reading`, with `A_l` as in `log_amplification`:

    - `equal-error`: `τ_l ∝ 1 / A_l`, so that `A_l τ_l`, the error of layer l at the output, is equal for all layers: if
      later layers contract, early ones may have larger errors.
    - `downstream`: `τ_l ∝ A_l`, "the cumulative downstream contraction" as the paper defines it.

    Structural sensitivity, §6.4, contains both: its 54 % for the last third of GPT-2 Small and 19 % for the first
    require the second, because with every ρ < 1 `1 / A_l` decreases with l; that the budget is "highest for early
    layers", two sentences later, requires the first. Only the first follows from a model of the error.
    """
    matrices = Matrices.of(model)
    logs = log_amplification(profile)[matrices.layers] / 2
    target = _exponentials(logs if reading == "downstream" else -logs)
    amount = fit(target, matrices.sizes, budget, high=SPARSEST)
    return matrices.allocated("lyapunov-budget", budget, amount, {"reading": reading}, (profile.measured_on,))


def wide_where_amplified(
    model: PreTrainedModel, budget: float, profile: ContractionProfile, *, low: int, high: int
) -> Allocation:
    """`high` bits per weight for the layers of largest `A_l = Π_{k > l} ρ_k`, `low` bits for the others (§6.2).

    The number of layers with `high` bits makes the mean over all entries equal to the `budget`, in bits; on a tie the
    earlier layer gets `high` bits. Raises LyapunovPruneError where whole layers do not add up to this budget.
    """
    matrices = Matrices.of(model)
    order = np.argsort(-log_amplification(profile), kind="stable")
    wide = np.concatenate([[0.0], np.cumsum(np.bincount(matrices.layers, matrices.sizes, len(order))[order])])
    attainable = low + (high - low) * (wide / wide[-1])
    count = int(np.argmin(np.abs(attainable - budget)))
    if not abs(attainable[count] - budget) <= 1e-12 * high:
        raise LyapunovPruneError(f"whole layers of {low} and {high} bits have no mean of {budget:g}")
    amount = np.where(np.isin(matrices.layers, order[:count]), float(high), float(low))
    widths: dict[str, float | str] = {"low": low, "high": high}
    return matrices.allocated("bits", budget, amount, widths, (profile.measured_on,), "bits")


def log_rho(profile: ContractionProfile) -> np.ndarray:
    """`ln ρ_l`, (L,) float64; raises LyapunovPruneError when every ρ lies below the rounding floor."""
    profile.require_above_floor()
    return np.log(profile.rho)


def log_amplification(profile: ContractionProfile) -> np.ndarray:
    """`ln A_l = Σ_{k > l} ln ρ_k`, (L,) float64; 0 for the last layer.

    In logarithms, because the product over many layers overflows.
    """
    return np.concatenate([np.cumsum(log_rho(profile)[:0:-1])[::-1], [0.0]])


def _exponentials(logs: np.ndarray) -> np.ndarray:
    """`exp(logs)` up to a common factor."""
    if np.ptp(logs) > np.log(SPAN):
        raise LyapunovPruneError("the amplifications of the layers are too far apart for float64; use another schedule")
    return np.exp(logs - logs.max())
