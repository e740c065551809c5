"""GPTQ: weights are rounded one input at a time, and the later inputs compensate for each rounding."""

from __future__ import annotations

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.method import Rounder
from lyapunov_prune.compression.second_order import SecondOrder, inverse_factor, swept
from lyapunov_prune.lazy import torch


class GPTQ(SecondOrder, Rounder):
    """Round `W` (m × n) to the grids of `rtn`, and update the weights not rounded yet to preserve `W X`.

    Inputs are rounded one after another to the nearest points, and the error of each updates the later ones
    (`second_order.swept`), by the `H` of `SecondOrder` for a Gram matrix in any scale. With `act_order` the inputs of
    largest energy `H_jj` come first, while all others can still compensate. Frantar et al., GPTQ (ICLR 2023,
    arXiv:2210.17323), Algorithm 1.

    The grids are those of the given matrix, before any update or correction ("static groups"). The order of the inputs
    therefore does not change which of them share a grid, and the integers and scales of `rtn` can store the result. An
    input that was always zero is rounded to nearest.

    Float64 throughout, rounded once to the dtype of `W`. Raises LyapunovPruneError for a Gram matrix of another shape,
    without energy or without inverse, for `bits` outside `grids.WIDTHS` and for a group size that does not divide n.
    """

    act_order: bool = True

    help = "round inputs one by one; the remaining ones compensate"
    reference = "Frantar et al., ICLR 2023, arXiv:2210.17323, Algorithm 1"

    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        n = W.shape[1]
        nearest = self.steps(W, amount).of_column()
        V, H, _ = self.begin(W, statistics)
        order = torch.arange(n, device=W.device)
        if self.act_order:
            order = H.diagonal().argsort(descending=True, stable=True)
        group = (order // (self.group_size or n)).tolist()

        def rounded(j: int, V: torch.Tensor) -> torch.Tensor:
            return nearest(group[j], V[:, j])

        V = swept(V[:, order], inverse_factor(H[order][:, order]), rounded, self.block)
        return V[:, order.argsort()].to(W)
