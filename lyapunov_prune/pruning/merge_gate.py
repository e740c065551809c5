"""Merged matrices against the blocks that they stand for, one by one, within the rounding of storing them.

Logits show that a matrix stands where it should. How far they move when each number of it is rounded once depends on
the model: SmolLM2-135M with seven merged blocks amplifies float32 beyond the limit of two equal computations. So of a
model with merged blocks the logits are held to the limit of two ways to compute the same, and the matrices themselves,
read from the model that was made, to the bound of `merge_rounding`.
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
    """Whether `W x + b = W_out τ(x) + b_out` on random inputs x, in float64, but for the rounding of W and b.

    A row is the layer, `(W_out, b_out)`, τ, and the `(W, b)` that is stored.
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
    """Rows of `merged_check`: `layers` are the original's, `blocks` are by their number there; `stored` gives the
    matrix that stands for a block."""
    for index, (block, tau) in blocks.items():
        yield index, block.parts(layers[index]).out, tau, stored(index)
