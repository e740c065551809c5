"""What an error of each layer becomes at the end of the model, by its contraction profile."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Matrices
from lyapunov_prune.allocation.fitting import SPAN
from lyapunov_prune.arguments import checked
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.projections import weights_of
from lyapunov_prune.profiles.contraction_profile import ContractionProfile

Reading = Literal["equal-error", "downstream"]


def log_rho(profile: ContractionProfile) -> np.ndarray:
    """`ln ρ_l`, (L,) float64.

    Raises LyapunovPruneError for a ρ that is not finite or not positive, and when every ρ lies below the rounding
    floor.
    """
    rho = profile.rho
    wrong = ~(np.isfinite(rho) & (rho > 0))
    if wrong.any():
        layer = int(np.argmax(wrong))
        raise LyapunovPruneError(f"rho of layer {layer} is {rho[layer]:g}; measure again in float32 or with method jvp")
    profile.require_above_floor()
    return np.log(rho)


def log_amplification(profile: ContractionProfile) -> np.ndarray:
    """`ln A_l = Σ_{k > l} ln ρ_k`, (L,) float64; 0 for the last layer.

    In logarithms, because the product over many layers overflows. Raises like `log_rho`.
    """
    logs = log_rho(profile)
    return np.concatenate([np.cumsum(logs[:0:-1])[::-1], [0.0]])


@checked
def tolerance(profile: ContractionProfile, reading: Reading = "equal-error") -> np.ndarray:
    """Share of the total error energy that each layer may add, (L,) float64, sum 1: the Lyapunov budget.

    By `reading`, with `A_l` as in `log_amplification`:

    - `equal-error`: `τ_l ∝ 1 / A_l`, so that `A_l τ_l`, the error of layer l at the output, is equal for all layers: if
      later layers contract, early ones may have larger errors.
    - `downstream`: `τ_l ∝ A_l`, "the cumulative downstream contraction" as the paper defines it.

    Structural sensitivity, §6.4, contains both: its 54 % for the last third of GPT-2 Small and 19 % for the first
    require the second, because with every ρ < 1 `1 / A_l` decreases with l; that the budget is "highest for early
    layers", two sentences later, requires the first. Only the first follows from a model of the error.

    Raises like `log_amplification`.
    """
    logs = log_tolerance(profile, reading)
    share = np.exp(logs - logs.max())
    return share / share.sum()


@torch.no_grad()
def weight_energy(model: PreTrainedModel, matrices: Matrices) -> np.ndarray:
    """`‖W‖_F²` of every matrix, (M,), squares summed in float64."""
    return np.array([float(lift(W).square().sum()) for _, W in weights_of(model, matrices.projections)])


def log_tolerance(profile: ContractionProfile, reading: Reading) -> np.ndarray:
    """`ln τ_l` up to a constant, (L,)."""
    logs = log_amplification(profile)
    return logs if reading == "downstream" else -logs


def exponentials(logs: np.ndarray) -> np.ndarray:
    """`exp(logs)` up to a common factor."""
    if np.ptp(logs) > math.log(SPAN):
        raise LyapunovPruneError("the amplifications of the layers are too far apart for float64; use another schedule")
    return np.exp(logs - logs.max())
