"""Bits by position: the first and the last layer get more than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.bit_widths import BitWidths, noise
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from lyapunov_prune.allocation.allocation import Matrices


class BitsEnds(BitWidths):
    """The cost of b bits is `w_l 4^−b` with `w = 4^4` for the first and the last layer and 1 for the others.

    These two layers get about four bits more than the others, the rule of thumb of llama.cpp's mixes.
    """

    help = "more bits for the first and the last layer, the same for all others"
    reference = "control"

    def cost(self, matrices: Matrices, given: Any) -> np.ndarray:
        weight = np.ones(matrices.model.num_layers)
        weight[[0, -1]] = 4.0**4
        return weight[:, None] * noise(self.widths)
