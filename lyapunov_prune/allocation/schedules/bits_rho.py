"""Bits by ρ: the layers in which an error grows most get more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.bit_widths import BitWidths, weighted_noise

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.lazy import np
    from lyapunov_prune.profiles.contraction_profile import ContractionProfile


class BitsRho(BitWidths):
    """The cost of b bits in layer l is `ρ_l² 4^−b`, the energy of a rounding error after its growth in this layer.

    Raises LyapunovPruneError for a profile of another model and for a ρ that is not finite or not positive.
    """

    help = "bits of each layer by its rho: more where errors grow most"
    reference = "structural sensitivity, §7"
    needs = "profile"

    def cost(self, matrices: Matrices, given: Any) -> np.ndarray:
        return weighted_noise(self.log_weight(given), self.widths)

    def log_weight(self, profile: ContractionProfile) -> np.ndarray:
        """`ln w_l` of every layer (L,), for the cost `w_l² 4^−b`."""
        from lyapunov_prune.allocation.amplification import log_rho

        return log_rho(profile)
