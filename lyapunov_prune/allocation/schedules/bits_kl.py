"""Bits where the prediction feels it: the measured divergence of every layer at every width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.bit_widths import BitWidths
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices


@dataclass(frozen=True)
class BitsKL(BitWidths):
    """The cost of b bits in layer l is `KL(p‖q)` with that layer alone rounded, measured on the calibration text.

    The sum over layers stands for the divergence of all of them rounded together, which it is to first order.
    """

    name = "bits-kl"
    help = "bits a layer by the measured KL of rounding it alone"
    reference = "Dong et al., NeurIPS 2020, arXiv:1911.03852, with KL in place of curvature"
    needs = "cost"

    def cost(self, matrices: Matrices, given: Any) -> np.ndarray:
        return given(self.widths)
