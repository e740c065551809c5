"""Bits by A: the layers whose errors the later layers amplify most get more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.bit_widths import BitWidths, weighted_noise

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.lazy import np


@dataclass(frozen=True)
class BitsAmplification(BitWidths):
    """The cost of b bits in layer l is `A_l² 4^−b` with `A_l = Π_{k > l} ρ_k`, the energy of the error at the output.

    Raises LyapunovPruneError for a profile of another model and for a ρ that is not finite or not positive.
    """

    name = "bits-amplification"
    help = "bits of each layer by the product of the rho of later layers"
    reference = "structural sensitivity, §6.2"
    needs = "profile"

    def cost(self, matrices: Matrices, given: Any) -> np.ndarray:
        from lyapunov_prune.allocation.amplification import log_amplification

        matrices.model.require(given.measured_on.model, "the contraction profile")
        return weighted_noise(log_amplification(given), self.widths)
