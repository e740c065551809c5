"""Bit widths by amplification: the layers whose errors grow most get more bits."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from lyapunov_prune.allocation.allocation import Allocation, Matrices
from lyapunov_prune.allocation.amplification import log_amplification, require_profile
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.profiles.contraction_profile import ContractionProfile

LOW, HIGH = 4, 8


def allocate_bits(
    model: PreTrainedModel, budget: float, profile: ContractionProfile, *, low: int = LOW, high: int = HIGH
) -> Allocation:
    """`high` bits per weight for the layers of largest `A_l = Π_{k > l} ρ_k`, `low` bits for the others.

    As many layers as make the mean over all entries equal to the `budget`, in bits; the earlier layer wins a tie. The
    rounding error of layer l is multiplied by `A_l` on its way to the output (structural sensitivity, §6.2).

    Raises LyapunovPruneError with the nearest attainable budgets when whole layers do not add up to this one, unless
    the widths are ascending integers from 1 to 16, for a profile of another model, and for a ρ that is not finite or
    not positive.
    """
    if not (low % 1 == 0 and high % 1 == 0 and 1 <= low < high <= 16):
        raise LyapunovPruneError(f"bit widths {low:g} and {high:g}; give two integers from 1 to 16, the lower first")
    matrices = Matrices.of(model)
    require_profile(profile, matrices.model)
    order = np.argsort(-log_amplification(profile), kind="stable")
    entries = np.bincount(matrices.layers, matrices.sizes, len(order))[order]
    wide = np.concatenate([[0.0], np.cumsum(entries)])
    attainable = low + (high - low) * (wide / wide[-1])
    count = int(np.argmin(np.abs(attainable - budget)))
    if not abs(attainable[count] - budget) <= 1e-12 * high:
        below, above = attainable[attainable < budget], attainable[attainable > budget]
        nearest = " or ".join(repr(float(b)) for b in (*below[-1:], *above[:1]))
        raise LyapunovPruneError(f"whole layers of {low} and {high} bits have no mean of {budget:g}; give {nearest}")
    amount = np.where(np.isin(matrices.layers, order[:count]), float(high), float(low))
    parameters = {"low": low, "high": high}
    return matrices.allocated("bits", budget, amount, parameters, unit="bits", profile=profile)


def require_mixed(budget: float, *, low: int = LOW, high: int = HIGH) -> None:
    """Raise LyapunovPruneError for a mean that forces the same width on every layer."""
    if budget in (low, high):
        raise LyapunovPruneError(
            f"allocation bits with a mean of {budget:g} gives every layer {budget:g} bits; give a mean between {low:g} "
            f"and {high:g}, or allocation uniform"
        )
