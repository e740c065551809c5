"""What a plain checkpoint holds in place of a part of a layer: zeros, or a block whose activation cancels.

A plain transformers checkpoint cannot say that a layer lacks its attention or its MLP. With a zero output projection
the sublayer adds nothing to the residual stream, which computes the same. Nor can it say that a block is one matrix M.
But `σ(x) − σ(−x) = x` for GELU, SiLU and ReLU, so a plain block computes it with `W₁ = [I; −I]` and `W₂ = [M, −M]`:
`W₂ σ(W₁ x) = M (σ(x) − σ(−x)) = M x`. The rest of both matrices is zero. Gated blocks multiply two such maps, which no
identity makes linear.

All numbers are stored and multiplied, so this shows what a part is worth but saves no time or memory. In a compact
checkpoint attentions are gone, and a merged block is the matrix alone (`export.compact`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.branches import zero_outputs
from lyapunov_prune.forward.sublayers import find_sublayers, named_branches
from lyapunov_prune.merging.merge import Merged
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.feedforward import Affine, FeedForward, find_feedforward
from lyapunov_prune.models.structure import Structure, in_eval_mode

_REMEDY = "give --format compact"
_POINTS = 4097
_RANGE = 32.0
_SAME = 1e-12


def require_mirrored(structure: Structure, layers: Sequence[int]) -> None:
    """`require_plain_block` for the blocks of these layers; raises as `find_feedforward` too."""
    for index in layers:
        require_plain_block(find_feedforward(structure, index), structure.layers[index])


def require_plain_block(block: FeedForward, layer: nn.Module) -> None:
    """Raise LyapunovPruneError unless the `block` of `layer` can compute a merged matrix and stay plain.

    It refuses a gated block, one with a hidden size below 2 d, and an activation without `σ(x) − σ(−x) = x`, which is
    tried in float64 on a grid.
    """
    activation: Any = layer.get_submodule(block.activation)
    hidden, width = block.parts(layer).up[0].shape
    why = "is gated" if block.gated else ""
    if not why and hidden < 2 * width:
        why = f"has {hidden} hidden units, fewer than twice its {width} inputs"
    if not why and not _is_odd_half(activation):
        why = f"has the activation {type(activation).__name__}, and σ(x) − σ(−x) is not x there"
    if why:
        raise _not_plain(block.layer, why)


@torch.no_grad()
def mirror(layer: nn.Module, merged: Merged) -> None:
    """Change the feed-forward block of `layer` in place, so that it computes `merged` through its own activation.

    Raises LyapunovPruneError if `merged` has a bias but the block's last matrix has none.
    """
    parts, d = merged.block.parts(layer), merged.weight.shape[0]
    (W1, b1), (W2, b2) = parts.up, parts.out
    if b2 is None and merged.bias is not None:
        raise _not_plain(merged.block.layer, f"has no bias to hold that of {merged.reduction}")
    for tensor in (W1, b1, W2, b2):
        if tensor is not None:
            tensor.zero_()
    W1[:d].fill_diagonal_(1)
    W1[d : 2 * d].fill_diagonal_(-1)
    W2[:, :d] = merged.weight
    W2[:, d : 2 * d] = -merged.weight
    if b2 is not None and merged.bias is not None:
        b2.copy_(merged.bias)


def mirrored(layer: nn.Module, block: FeedForward) -> Affine:
    """The merged matrix and bias that `mirror` wrote into the block of `layer`, as views of the model's parameters."""
    W2, b2 = block.parts(layer).out
    return W2[:, : W2.shape[0]], b2


@torch.no_grad()
def _is_odd_half(activation: nn.Module) -> bool:
    """Whether `σ(x) − σ(−x) = x` within rounding, over a range where every known activation has left its bend."""
    activation = copy.deepcopy(activation).to("cpu", torch.float64)  # a learnt activation lies on the model's device
    x = torch.linspace(-_RANGE, _RANGE, _POINTS, dtype=torch.float64)
    return bool(((activation(x) - activation(-x) - x).abs() <= _SAME * x.abs().clamp_min(1)).all())


def _not_plain(layer: int, why: str) -> LyapunovPruneError:
    return LyapunovPruneError(
        f"the feed-forward block of layer {layer} {why}, so a plain checkpoint cannot hold it merged; {_REMEDY}"
    )


@in_eval_mode
def zero_sublayers(decoder: Decoder, attention: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    """Set the output projections of these sublayers of `decoder` to zero: weight, bias, every expert.

    Trial forwards find which matrices they are (`forward.branches`). Raises LyapunovPruneError if a layer has no such
    sublayer, if something after the projection adds to the output (a norm with a bias), and if another layer uses the
    same matrix.
    """
    if not (attention or mlp):
        return
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in decoder.model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    sublayers = find_sublayers(decoder, sorted({*attention, *mlp}))
    for index, kind, branch in named_branches(sublayers, attention, mlp):
        needed = zero_outputs(branch)
        shared = (users[parameter] for parameter in needed or () if len(users[parameter]) > 1)
        why = next((f"{names[0]}, which is also {names[1]}" for names in shared), None)
        if needed is None:
            why = (
                f"a {type(branch.exit).__name__} that adds a bias or the residual stream, which zeroing the output "
                "projection does not remove"
            )
        if why:
            raise LyapunovPruneError(f"the {kind} of layer {index} ends in {why}; remove the whole layer")
