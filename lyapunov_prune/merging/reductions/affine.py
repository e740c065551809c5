"""Reduction `affine`: the block becomes its own least-squares fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.merging.reduction import HiddenMap, Reduction

if TYPE_CHECKING:
    from lyapunov_prune.calibration.blocks import BlockSums
    from lyapunov_prune.models.feedforward import BlockParts

# The ridge, relative to the mean variance of an input. On text not used for the fit it keeps, as a mean over the layers
# and from 2,048 tokens on, nearly as much as the best ridge of each layer (SmolLM2 and Gemma 3, experiments/5_joint); a
# small ridge can be worse than removing the block.
RIDGE = 0.1


class Affine(Reduction):
    """The affine map of least squares with a `ridge` (`least_squares`)."""

    ridge: float = RIDGE

    help = "the block is replaced by its least-squares fit"
    reference = "ridge regression: Hoerl and Kennard, Technometrics 12, 1970"
    blocks = ("plain", "gated")
    needs = ("input", "hidden", "input_input", "hidden_input")

    def map(self, parts: BlockParts, sums: BlockSums | None) -> HiddenMap:
        assert sums is not None
        return least_squares(sums, self.ridge)


def least_squares(sums: BlockSums, ridge: float = RIDGE) -> HiddenMap:
    """`argmin Σ ‖h − T x − t‖² + λ ‖T‖_F²`, λ = ridge · tokens · the mean variance of an input.

    `T = C_hx (C_xx + λ I)⁻¹` and `t = h̄ − T x̄` from the centred sums. As `T` is linear in h, `W_out T` is the
    least-squares fit of the block's output `W_out h` for any last matrix. Needs the sums of `affine`; raises
    LyapunovPruneError unless there are more tokens than inputs.
    """
    n, width = sums.tokens, len(sums["input"])
    if n <= width:
        raise LyapunovPruneError(
            f"{n} tokens are too few for a least-squares fit of {width} inputs; give more than {width}, or a reduction "
            "other than affine"
        )
    x, h = sums["input"] / n, sums["hidden"] / n
    C = damped(sums["input_input"] - n * torch.outer(x, x), ridge, x.device)
    cross = sums["hidden_input"] - n * torch.outer(h, x)
    T = torch.cholesky_solve(cross.T, torch.linalg.cholesky(C)).T
    return HiddenMap(T, h - T @ x)
