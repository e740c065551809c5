"""The linear map that replaces the hidden vector of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lyapunov_prune.calibration.blocks import BlockSums
from lyapunov_prune.calibration.gram import damped
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.merging.table import REDUCTIONS
from lyapunov_prune.models.feedforward import BlockParts, FeedForward, lifted

# The ridge of the least-squares fit, relative to the mean variance of an input. On held-out text it is near the best
# for every layer of both models of experiments/26_reductions, where a small ridge can be worse than no block.
RIDGE = 0.1


@dataclass(frozen=True, eq=False)
class HiddenMap:
    """`τ(x) = T x + t`, float64: `weight` is T (hidden × d), `bias` is t (hidden,) or None for zero."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def require_reduction(reduction: str, block: FeedForward) -> None:
    """Raise LyapunovPruneError unless `reduction` is one of REDUCTIONS and applies to blocks of this kind."""
    if reduction not in REDUCTIONS:
        raise LyapunovPruneError(f"unknown reduction {reduction!r}; give one of {', '.join(REDUCTIONS)}")
    kind = "gated" if block.gated else "plain"
    if kind not in REDUCTIONS[reduction].blocks:
        fitting = " or ".join(name for name, entry in REDUCTIONS.items() if kind in entry.blocks)
        raise LyapunovPruneError(
            f"the feed-forward block of layer {block.layer} is {kind}, and reduction {reduction} is for "
            f"{' and '.join(REDUCTIONS[reduction].blocks)} ones; give {fitting}"
        )


def hidden_map(reduction: str, parts: BlockParts, sums: BlockSums | None) -> HiddenMap:
    """The map of a reduction of REDUCTIONS for a block, from the sums that it needs.

    Raises LyapunovPruneError for fewer tokens than a fit has unknowns.
    """
    return _FUNCTIONS[reduction](parts, sums)


def _identity(parts: BlockParts, sums: BlockSums | None) -> HiddenMap:
    """`τ(x) = W₁ x + b₁`."""
    return HiddenMap(*lifted(parts.up))


def gate_constant(reduction: str, sums: BlockSums) -> torch.Tensor:
    """c (hidden,), float64: the constant that replaces a gate after its activation, by `mean-gate` or `scaled`.

    `c = E σ(W_g x + b_g)`, or `c_i = E[g_i u_i²]/E[u_i²]`, the least-squares fit of each `g_i u_i` by `u_i`; `c_i = 0`
    for a unit whose `u_i` was always zero.
    """
    if reduction == "mean-gate":
        return sums["gate"] / sums.tokens
    energy = sums["up_up"]
    return torch.where(energy > 0, sums["gate_up_up"] / energy.clamp_min(1e-300), 0)


def gated_by(parts: BlockParts, c: torch.Tensor) -> HiddenMap:
    """`τ(x) = c ⊙ (W_u x + b_u)`."""
    W, b = lifted(parts.up)
    return HiddenMap(c.unsqueeze(-1) * W, None if b is None else c * b)


def least_squares(sums: BlockSums, ridge: float = RIDGE) -> HiddenMap:
    """`argmin Σ ‖h − T x − t‖² + λ ‖T‖_F²`, λ = ridge · tokens · the mean variance of an input.

    `T = C_hx (C_xx + λ I)⁻¹` and `t = h̄ − T x̄` from the centred sums. As `T` is linear in h, `W_out T` is the
    least-squares fit of the block's output `W_out h` for any last matrix. Needs the sums of `affine`; raises
    LyapunovPruneError unless there are more tokens than inputs.
    """
    n, width = sums.tokens, len(sums["input"])
    if n <= width:
        raise LyapunovPruneError(
            f"a least-squares fit of {width} inputs and a constant needs more than {width} tokens and got {n}; "
            "give more calibration inputs, or a reduction other than affine"
        )
    x, h = sums["input"] / n, sums["hidden"] / n
    C = damped(sums["input_input"] - n * torch.outer(x, x), width, ridge, x.device)
    cross = sums["hidden_input"] - n * torch.outer(h, x)
    T = torch.cholesky_solve(cross.T, torch.linalg.cholesky(C)).T
    return HiddenMap(T, h - T @ x)


_FUNCTIONS: dict[str, Callable[..., HiddenMap]] = {
    "identity": _identity,
    "mean-gate": lambda parts, sums: gated_by(parts, gate_constant("mean-gate", sums)),
    "scaled": lambda parts, sums: gated_by(parts, gate_constant("scaled", sums)),
    "affine": lambda parts, sums: least_squares(sums),
}
