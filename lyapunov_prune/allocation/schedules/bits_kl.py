"""Bits by the measured divergence of the prediction, for every layer at every width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lyapunov_prune.allocation.bit_widths import BitWidths, evenly
from lyapunov_prune.lazy import np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lyapunov_prune.allocation.allocation import Matrices
    from lyapunov_prune.allocation.schedule import Amounts


class BitsKL(BitWidths):
    """The cost of b bits in layer l is `KL(p‖q)` with that layer alone rounded, measured on the calibration text.

    To first order, the sum over layers is the divergence with all of them rounded together. Because that may not hold,
    the result is checked: if uniform bits of the same budget diverge less on windows that gave no cost, they are taken
    instead. These windows are then used to choose between the two, and the lower divergence is a little too low.
    """

    help = "bits of each layer by the measured KL of rounding it alone"
    reference = "Dong et al., NeurIPS 2020, arXiv:1911.03852, with KL in place of curvature"
    needs = "cost"

    def cost(self, matrices: Matrices, given: Any) -> np.ndarray:
        return given(self.widths)

    def amounts(self, model: PreTrainedModel, matrices: Matrices, budget: float, given: Any) -> Amounts:
        amount, parameters = super().amounts(model, matrices, budget, given)
        even = evenly(matrices, budget, self.widths)
        own, uniform = given.together((matrices.allocated(self.name, budget, amount, parameters, unit=self.unit), even))
        told = {**parameters, "KL, used to choose": own, "KL of uniform bits, used to choose": uniform}
        return amount if own < uniform else even.amount, told
