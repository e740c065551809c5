"""A model that runs and trains as if attentions and activations were removed, and is merged afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.calibration.blocks import sum_blocks
from lyapunov_prune.forward.anatomy import find_anatomy, find_attentions, replaced, standing_in
from lyapunov_prune.merging.merge import product, require_smaller
from lyapunov_prune.merging.reduction import GateConstant, HiddenMap, gated_by
from lyapunov_prune.merging.table import REDUCTIONS, require_reduction
from lyapunov_prune.models.compact import compact_class
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.feedforward import Affine, FeedForward, find_feedforward, lifted
from lyapunov_prune.models.structure import in_eval_mode


class Constant(nn.Module):
    """Replaces a gate's activation: c (hidden,) for every input."""

    c: torch.Tensor

    def __init__(self, c: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("c", c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c.expand_as(x)


class Unmerged:
    """A model, whose layers can lose their attention or activation inside a with block.

    The module that replaces an activation (identity, and constants in the place of a gate) or a feed-forward block (any
    other reduction) is made once for every layer from the forwards of `run`, which runs the unchanged `model` over some
    inputs. Inside `cut` the weights around it can be trained, and the matrix of a replaced block itself; `merged`
    returns one affine map per block. `copy.deepcopy` gives another one to train.

    Raises LyapunovPruneError for a model without a compact class, an attention that cannot leave, a block that cannot
    be merged, and a reduction that does not apply to such blocks.
    """

    def __init__(self, decoder: Decoder, reduction: str, run: Callable[[], None]) -> None:
        self.decoder = decoder
        compact_class(decoder.model)
        structure = decoder.structure
        layers = structure.layers
        self.reduction = reduction
        self.blocks = tuple(find_feedforward(structure, i) for i in range(len(layers)))
        for block in self.blocks:
            require_reduction(reduction, block)
            require_smaller(block, block.parts(layers[block.layer]))
        # Each alone: what one layer reads of another's attention is not seen when both are left out.
        found = find_anatomy(decoder, range(len(layers)))
        self._attentions = {i: find_attentions(decoder, {i: one})[i].places for i, one in found.items()}
        self._stand_ins = _stand_ins(layers, self.blocks, reduction, run)
        self.model, self.layers = self.decoder.model, layers

    @contextmanager
    def cut(self, attention: Sequence[int], activation: Sequence[int]) -> Iterator[PreTrainedModel]:
        """`model` without the attentions and activations of these layers; restores all modules at the end."""
        width = self.decoder.structure.config.hidden_size
        changes = [(self.layers[i], self._stand_ins[i]) for i in activation]
        for layer, i in ((self.layers[i], i) for i in attention):
            changes.append((layer, replaced(layer, self._attentions[i], width)))
        with ExitStack() as stack:
            for layer, modules in changes:
                stack.enter_context(standing_in(layer, modules))
            yield self.model

    def hidden(self, activation: Sequence[int]) -> dict[int, HiddenMap]:
        """By layer, the map τ that replaces the hidden vector inside `cut`; a replaced block has none."""
        maps = {i: self._map(self.blocks[i]) for i in activation}
        return {i: tau for i, tau in maps.items() if tau is not None}

    def merged(self, activation: Sequence[int]) -> dict[int, Affine]:
        """By layer, the affine map that its feed-forward block is inside `cut`, formed in float64 (`product`)."""
        return {i: self._affine(self.blocks[i]) for i in activation}

    def _map(self, block: FeedForward) -> HiddenMap | None:
        stand_in = next(iter(self._stand_ins[block.layer].values()))
        if isinstance(stand_in, nn.Linear):
            return None
        parts = block.parts(self.layers[block.layer])
        return gated_by(parts, stand_in.c.double()) if isinstance(stand_in, Constant) else HiddenMap(*lifted(parts.up))

    def _affine(self, block: FeedForward) -> Affine:
        tau = self._map(block)
        if tau is not None:
            return product(block.parts(self.layers[block.layer]).out, tau)
        matrix: Any = next(iter(self._stand_ins[block.layer].values()))
        return matrix.weight.detach(), None if matrix.bias is None else matrix.bias.detach()


@in_eval_mode
def _stand_ins(
    layers: nn.ModuleList, blocks: Sequence[FeedForward], reduction: str, run: Callable[[], None]
) -> list[dict[str, nn.Module]]:
    """The replacement of each module, by layer and path."""
    chosen = REDUCTIONS.make(reduction)
    sums = sum_blocks(layers, blocks, chosen.needs, run) if chosen.needs else [None] * len(blocks)
    made: list[dict[str, nn.Module]] = []
    for block, summed in zip(blocks, sums, strict=True):
        parts = block.parts(layers[block.layer])
        if isinstance(chosen, GateConstant):
            assert summed is not None
            made.append({block.activation: Constant(chosen.constant(summed).to(parts.out[0]))})
        elif reduction == "identity":
            made.append({block.activation: nn.Identity()})
        else:
            W, b = product(parts.out, chosen.map(parts, summed))
            matrix = nn.Linear(W.shape[1], W.shape[0], bias=b is not None, device="meta")
            matrix.weight = nn.Parameter(W.to(parts.out[0]))
            if b is not None:
                matrix.bias = nn.Parameter(b.to(parts.out[0]))
            others = () if block.block else (block.activation, block.out.module)
            made.append({block.block or block.up.module: matrix, **{path: nn.Identity() for path in others}})
    return made
