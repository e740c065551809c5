"""Schedules from the contraction profile: how the error of each layer grows until the end of the model."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import SPARSEST, Allocation, Matrices, require_sparsity
from lyapunov_prune.allocation.fitting import SPAN, fit
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.projections import weights_of
from lyapunov_prune.profiles.contraction_profile import ContractionProfile
from lyapunov_prune.results.result import ModelIdentity

Reading = Literal["equal-error", "downstream"]


def log_amplification(profile: ContractionProfile) -> np.ndarray:
    """`ln A_l = Σ_{k > l} ln ρ_k`, (L,) float64; 0 for the last layer.

    In logarithms, because the product over many layers overflows. Raises LyapunovPruneError for a ρ that is not finite
    or not positive, and when every ρ lies below the rounding floor.
    """
    rho = profile.rho
    wrong = ~(np.isfinite(rho) & (rho > 0))
    if wrong.any():
        layer = int(np.argmax(wrong))
        raise LyapunovPruneError(f"rho of layer {layer} is {rho[layer]:g}; measure again in float32 or with method jvp")
    profile.require_above_floor()
    logs = np.log(rho)
    return np.concatenate([np.cumsum(logs[:0:-1])[::-1], [0.0]])


def tolerance(profile: ContractionProfile, reading: Reading = "equal-error") -> np.ndarray:
    """Share of the total error energy that each layer may add, (L,) float64, sum 1: the Lyapunov budget.

    By `reading`, with `A_l` as in `log_amplification`:

    - `equal-error`: `τ_l ∝ 1 / A_l`, so that `A_l τ_l`, the error of layer l at the output, is equal for all layers: if
      later layers contract, early ones may have larger errors.
    - `downstream`: `τ_l ∝ A_l`, "the cumulative downstream contraction" as the paper defines it.

    Structural sensitivity, §6.4, contains both: its 54 % for the last third of GPT-2 Small and 19 % for the first
    require the second, because with every ρ < 1 `1 / A_l` decreases with l; that the budget is "highest for early
    layers", two sentences later, requires the first. Only the first follows from a model of the error.

    Raises LyapunovPruneError for another reading, and like `log_amplification`.
    """
    logs = _log_tolerance(profile, reading)
    share = np.exp(logs - logs.max())
    return share / share.sum()


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

    Raises LyapunovPruneError for bounds that exclude 1, a budget that the bounds exclude, a profile of another model, a
    ρ that is not finite or not positive, and a layer of zeros.
    """
    require_sparsity(budget)
    if not 0 <= least <= 1 <= most:
        raise LyapunovPruneError(f"least {least:g}, most {most:g}; give multiples of the budget, 0 to 1 and 1 or more")
    matrices = Matrices.of(model)
    require_profile(profile, matrices.model)
    w = matrices.layer_sum(weight_energy(model, matrices))
    if not (np.isfinite(w) & (w > 0)).all():
        layer = int(matrices.layers[np.argmin(np.isfinite(w) & (w > 0))])
        raise LyapunovPruneError(f"the weights of layer {layer} are all zero or not finite; use another schedule")
    logs = np.log(matrices.layer_sum(matrices.sizes)) - np.log(w) - log_amplification(profile)[matrices.layers]
    high = min(most * budget, SPARSEST)
    amount = fit(_exponentials(logs), matrices.sizes, budget, low=min(least * budget, high), high=high)
    parameters = {"least": least, "most": most}
    return matrices.allocated("lyapunov", budget, amount, parameters, profile=profile)


def lyapunov_budget(
    model: PreTrainedModel, budget: float, profile: ContractionProfile, *, reading: Reading = "equal-error"
) -> Allocation:
    """`s_l ∝ √τ_l`, with `τ` the `tolerance` by `reading`, because error energy grows as the square of the sparsity.

    With the reading `equal-error` every layer adds the same error at the output, except those at the ceiling of 0.99.
    Structural sensitivity, §6.4. Raises LyapunovPruneError for a budget outside `0 … 0.99`, another reading, a profile
    of another model, and a ρ that is not finite or not positive.
    """
    require_sparsity(budget)
    matrices = Matrices.of(model)
    require_profile(profile, matrices.model)
    target = _exponentials(_log_tolerance(profile, reading)[matrices.layers] / 2)
    amount = fit(target, matrices.sizes, budget, high=SPARSEST)
    return matrices.allocated("lyapunov-budget", budget, amount, {"reading": reading}, profile=profile)


@torch.no_grad()
def weight_energy(model: PreTrainedModel, matrices: Matrices) -> np.ndarray:
    """`‖W‖_F²` of every matrix, (M,), squares summed in float64."""
    return np.array([float(lift(W).square().sum()) for _, W in weights_of(model, matrices.projections)])


def require_profile(profile: ContractionProfile, model: ModelIdentity) -> None:
    """Raise LyapunovPruneError unless the profile is one of this model."""
    if not profile.measured_on.model.same_as(model):
        raise LyapunovPruneError(
            f"the contraction profile is of {profile.measured_on.model.name}, not of {model.name}"
            f"{model.other_setting(profile.measured_on.model)}; measure this model"
        )


def _log_tolerance(profile: ContractionProfile, reading: str) -> np.ndarray:
    """`ln τ_l` up to a constant, (L,)."""
    if reading not in get_args(Reading):
        raise LyapunovPruneError(f"unknown reading {reading!r} of the budget; give {' or '.join(get_args(Reading))}")
    logs = log_amplification(profile)
    return logs if reading == "downstream" else -logs


def _exponentials(logs: np.ndarray) -> np.ndarray:
    """`exp(logs)` up to a common factor."""
    if np.ptp(logs) > math.log(SPAN):
        raise LyapunovPruneError("the amplifications of the layers are too far apart for float64; use another schedule")
    return np.exp(logs - logs.max())
