"""Bits by A: the layers whose errors the later layers amplify most get more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.allocation.schedules.bits_rho import BitsRho

if TYPE_CHECKING:
    from lyapunov_prune.lazy import np
    from lyapunov_prune.profiles.contraction_profile import ContractionProfile


class BitsAmplification(BitsRho):
    """The cost of b bits in layer l is `A_l² 4^−b` with `A_l = Π_{k > l} ρ_k`, the energy of the error at the output.

    Raises LyapunovPruneError for a profile of another model and for a ρ that is not finite or not positive.
    """

    help = "bits of each layer by the product of the rho of later layers"
    reference = "structural sensitivity, §6.2"

    def log_weight(self, profile: ContractionProfile) -> np.ndarray:
        from lyapunov_prune.allocation.amplification import log_amplification

        return log_amplification(profile)
