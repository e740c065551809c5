"""One matrix for a feed-forward block whose hidden vector is replaced by a linear map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import nn

from lyapunov_prune.arguments import SOME, Count
from lyapunov_prune.calibration.blocks import sum_blocks
from lyapunov_prune.data.examples import as_examples, model_inputs
from lyapunov_prune.data.images import ImageBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.hooks import run_up_to
from lyapunov_prune.forward.reading import Readable, Reading
from lyapunov_prune.linalg import lift, require_numbers
from lyapunov_prune.merging.reduction import HiddenMap
from lyapunov_prune.merging.table import REDUCTIONS, require_reduction
from lyapunov_prune.models.decoder import InMemoryAny, runs_model
from lyapunov_prune.models.feedforward import Affine, BlockParts, FeedForward, find_feedforward, lifted
from lyapunov_prune.progress import track
from lyapunov_prune.results.arrays import each_once


@dataclass(frozen=True, eq=False)
class Merged:
    """A feed-forward block as one affine map `ŷ = weight x + bias`, in the model's dtype.

    `weight` is output × input, `bias` (output,) or None. `tau` is the map that replaces the hidden vector; `weight =
    W_out T` and `bias = W_out t + b_out` are formed in float64 and rounded once.
    """

    block: FeedForward
    reduction: str
    tau: HiddenMap
    weight: torch.Tensor
    bias: torch.Tensor | None
    before: int  # number of weights and biases of the block

    @property
    def after(self) -> int:
        """Number of weights and biases of the merged map."""
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())


@runs_model
def merge_layers(
    model: InMemoryAny,
    batch: Readable | ImageBatch,
    layers: Annotated[Sequence[int], SOME],
    reduction: str,
    *,
    batch_size: Count = 1,
) -> tuple[Merged, ...]:
    """Merge the feed-forward blocks of these layers of a model, which is not changed, see `merge_blocks`.

    `batch` is text for a decoder and images for an image classifier. The statistics come from one forward of the
    unchanged model, up to the last of the layers, if the reduction needs any. Raises like `merge_blocks` and
    `find_feedforward`.
    """
    structure, examples = model.structure, as_examples(model, batch.batch if isinstance(batch, Reading) else batch)
    inputs = model_inputs(model.model, examples, batch_size)
    each_once("layers to merge", layers, structure.num_layers)
    blocks = [find_feedforward(structure, i) for i in layers]
    last = structure.layers[max(layers)]

    def run() -> None:
        for items in track(inputs, f"merging, {reduction}"):
            run_up_to(structure, last, items, lambda *_: None)

    return merge_blocks(structure.layers, blocks, reduction, run)


@torch.no_grad()
def merge_blocks(
    layers: nn.ModuleList, blocks: Sequence[FeedForward], reduction: str, run: Callable[[], None]
) -> tuple[Merged, ...]:
    """One matrix for each of `blocks` of `layers`, by a reduction of `REDUCTIONS`; the layers are not changed.

    `run` runs the model, in eval mode, over its calibration inputs (text or images); it is called if the reduction
    needs sums. No activation is kept after its forward. Memory: the sums of all blocks, d (d + hidden) numbers each for
    `affine`.

    Raises LyapunovPruneError for a reduction that is unknown or does not apply to such a block, for a merge that would
    not be smaller, for too few inputs, for activations that are not finite, and for a product that overflows the
    model's dtype.
    """
    parts = [block.parts(layers[block.layer]) for block in blocks]
    for block, p in zip(blocks, parts, strict=True):
        require_reduction(reduction, block)
        require_smaller(block, p)
    made = REDUCTIONS.make(reduction)
    sums = sum_blocks(layers, blocks, made.needs, run) if made.needs else [None] * len(blocks)
    taus = [made.map(p, s) for p, s in zip(parts, sums, strict=True)]
    stored = [_rounded(block, p, tau) for block, p, tau in zip(blocks, parts, taus, strict=True)]
    return tuple(
        Merged(block, reduction, tau, *affine, p.numbers)
        for block, tau, affine, p in zip(blocks, taus, stored, parts, strict=True)
    )


def product(out: Affine, tau: HiddenMap) -> Affine:
    """`W_out T` (output × input) and `W_out t + b_out`, float64; theorem `merged_projection`.

    `out` is the last matrix of the block in any dtype, `tau` the map before it. The second is None without biases.
    """
    W, b = lifted(out)
    moved = None if tau.bias is None else W @ tau.bias
    bias = moved if b is None else b if moved is None else moved + b
    return W @ tau.weight, bias


def merge_rounding(
    out: Affine, tau: HiddenMap, merged: Affine, x: np.ndarray, hidden: np.ndarray, *, unit: float = 2.0**-53
) -> np.ndarray:
    """Upper bound of the error of `‖(W_out h + b_out) − (W x + b)‖` when computed with unit roundoff `unit`.

    Compared with the exact product and any vector `h`, for example `τ(x)`; one entry per input. `merged = (W, b)` is
    the product rounded to its dtype of unit u; `x` and `hidden` are norms of x and h. Rounding the product moves the
    output by at most `u (‖W‖_F ‖x‖ + ‖b‖)`, plus underflow. Every sum of k products is within `γ_k` of the sum of their
    absolute values (Higham, Accuracy and Stability, §3.1), and so is a norm; the terms of all sums here are at most
    `‖W_out‖_F (‖h‖ + ‖T‖_F ‖x‖ + ‖t‖) + ‖b_out‖ + ‖W‖_F ‖x‖ + ‖b‖`. `γ` is taken for the sum of their lengths, doubled.
    """
    W, b = merged
    kind = torch.finfo(W.dtype)
    stored = _size(W) * x + _size(b)
    lost = kind.tiny * kind.eps * (W.numel() ** 0.5 * x + W.shape[0] ** 0.5)
    steps = 2 * (3 * sum(out[0].shape) + 2 * W.shape[1] + 32) * unit
    terms = _size(out[0]) * (hidden + _size(tau.weight) * x + _size(tau.bias)) + _size(out[1]) + stored
    return kind.eps / 2 * stored + lost + steps * terms


def _size(x: torch.Tensor | None) -> float:
    """`‖x‖` of a vector, `‖x‖_F` of a matrix."""
    return 0.0 if x is None else float(torch.linalg.vector_norm(lift(x)))


def require_smaller(block: FeedForward, parts: BlockParts) -> None:
    """Raise LyapunovPruneError unless the merged matrix has fewer numbers than the block."""
    outputs, inputs = parts.out[0].shape[0], parts.up[0].shape[1]
    after = outputs * inputs + outputs
    if after >= parts.numbers:
        raise LyapunovPruneError(
            f"merging the feed-forward block of layer {block.layer} would make {after:,} parameters of "
            f"{parts.numbers:,}, which is no smaller; choose other layers"
        )


def _rounded(block: FeedForward, parts: BlockParts, tau: HiddenMap) -> Affine:
    W, b = product(parts.out, tau)
    like = parts.out[0]
    stored = W.to(like), None if b is None else b.to(like)
    for numbers in stored:
        if numbers is not None:
            require_numbers(numbers, f"the merged matrix of layer {block.layer} in {like.dtype}")
    return stored
