"""Compare each merged matrix with the block that it replaces, within the rounding of storing it.

Logits show that a matrix is in the right place. How far they move when each of its numbers is rounded once depends on
the model: SmolLM2-135M with seven merged blocks amplifies float32 rounding beyond the limit for two equal computations.
So the logits of a model with merged blocks get the wider limit for two ways to compute the same, and the matrices
themselves, read from the new model, must stay within the bound of `merge_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.functional import linear

from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.merging.merge import merge_rounding
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.models.feedforward import Affine, FeedForward, lifted

MERGED = "merged within rounding"
_INPUTS = 8


@torch.no_grad()
def merged_check(rows: Iterable[tuple[int, Affine, HiddenMap, Affine]], what: str) -> GateCheck:
    """Whether `W x + b = W_out τ(x) + b_out` on random inputs x, in float64, up to the rounding of W and b.

    Each row holds the layer, `(W_out, b_out)`, τ, and the stored `(W, b)`.
    """
    worst, layer = 0.0, -1
    for index, out, tau, merged in rows:
        (W, b), wide = lifted(merged), lifted(out)
        x = torch.randn(_INPUTS, W.shape[1], dtype=W.dtype, generator=torch.Generator().manual_seed(index)).to(W.device)
        h = tau(x)
        error = (linear(h, *wide) - linear(x, W, b)).norm(dim=-1).cpu().numpy()
        sizes = x.norm(dim=-1).cpu().numpy(), h.norm(dim=-1).cpu().numpy()
        beyond = float((error / merge_rounding(out, tau, merged, *sizes)).max())
        if not beyond <= worst:
            worst, layer = beyond, index
    detail = f"error of {what} over what rounding allows, most in layer {layer}"
    return GateCheck(MERGED, worst <= 1, worst, 1.0, detail)


def merged_blocks(
    layers: nn.ModuleList, blocks: Mapping[int, tuple[FeedForward, HiddenMap]], stored: Callable[[int], Affine]
) -> Iterator[tuple[int, Affine, HiddenMap, Affine]]:
    """The rows of `merged_check`. `layers` are the original's, `blocks` go by their number there; `stored` returns the
    matrix that replaces a block."""
    for index, (block, tau) in blocks.items():
        yield index, block.parts(layers[index]).out, tau, stored(index)
