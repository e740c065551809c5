"""A layer runs on what the changed layers before it make, alike for a model in memory and for a streamed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import lyapunov_prune as lp
from lyapunov_prune.forward.layers import each_layer
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.loading import load


@torch.no_grad()
def halved_at(decoder: Decoder, ids: torch.Tensor, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """What leaves each of `layers`, whose weights are halved after it."""
    found: dict[int, torch.Tensor] = {}

    def visit(layer: int, outputs: Iterator[torch.Tensor]) -> None:
        found[layer] = torch.cat([output.clone() for output in outputs])
        for p in decoder.layers[layer].parameters():
            p.mul_(0.5)

    each_layer(read(decoder, ids), layers, visit, 1, "layers")
    return found


def test_the_layers_asked_for_are_visited_in_order_wherever_their_weights_are(
    checkpoint: Path, ids: torch.Tensor
) -> None:
    whole, apart = (halved_at(made(checkpoint), ids, (1, 2, 4)) for made in (load, lp.load_streamed))
    assert [*whole] == [*apart] == [1, 2, 4]
    for layer, output in whole.items():
        torch.testing.assert_close(apart[layer], output)
    alone = halved_at(load(checkpoint), ids, (4,))[4]
    assert not torch.allclose(alone, whole[4])
