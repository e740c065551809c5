"""A merged matrix in the place of its feed-forward block."""

from __future__ import annotations

from torch import nn

from lyapunov_prune.merging.merge import Merged


def place(layer: nn.Module, merged: Merged) -> None:
    """Let `layer` have one `nn.Linear` where its feed-forward block was, in place.

    The module that is the block becomes the matrix; where the parts lie bare in the layer (OPT), the first matrix does,
    and activation and last matrix become identities. The rest of the layer is called as before.
    """
    weight, bias, block = merged.weight, merged.bias, merged.block
    matrix = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    matrix.weight = nn.Parameter(weight.clone())
    if bias is not None:
        matrix.bias = nn.Parameter(bias.clone())
    layer.set_submodule(block.block or block.up.module, matrix.train(layer.training))
    if not block.block:
        for path in (block.activation, block.out.module):
            layer.set_submodule(path, nn.Identity())
