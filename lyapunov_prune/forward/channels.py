"""Hidden channels of feed-forward blocks and experts masked: the reference for a model without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lyapunov_prune.forward.replacement import Replacement
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.hooked import hooked
from lyapunov_prune.models.projections import Projection
from lyapunov_prune.models.units import Refits, inside


@contextmanager
def masked(
    decoder: Decoder, kept: Mapping[int, Sequence[torch.Tensor | None]], refits: Refits | None = None
) -> Iterator[None]:
    """Inside the block, the columns of last matrices are zero for all hidden channels except those in `kept`.

    `kept` has the channels of each unit by layer, None if all stay. `refits` replace the other columns, if given; a
    layer's index there is that among the layers of `kept`. The
    matrices of a layer are replaced while it runs, so this takes the memory of one layer's.
    """
    units, structure = decoder.units, decoder.structure
    before: list[tuple[nn.Module, Callable[..., None]]] = []
    after: list[tuple[nn.Module, Callable[..., None]]] = []
    with ExitStack() as stack:
        for i, (layer, here) in enumerate(kept.items()):
            lasts = {
                unit.out: (channels, (refits or {}).get((i, j)))
                for j, (unit, channels) in enumerate(zip(units[layer], here, strict=True))
                if channels is not None
            }
            change = _Masked(structure.layers[layer], f"{structure.layers_path}.{layer}.", lasts)
            stack.callback(change.remove)
            before.append((structure.layers[layer], lambda *_, change=change: change.install()))
            after.append((structure.layers[layer], lambda *_, change=change: change.remove()))
        with hooked(before=before, after=after):
            yield


class _Masked:
    """The last matrices of a layer with other columns, while it runs."""

    def __init__(
        self, layer: nn.Module, below: str, lasts: Mapping[Projection, tuple[torch.Tensor, torch.Tensor | None]]
    ) -> None:
        self.by_parameter: dict[tuple[nn.Module, str], dict[Projection, tuple[torch.Tensor, torch.Tensor | None]]] = {}
        for p, changed in lasts.items():
            place = layer.get_submodule(inside(p.module, below)), p.parameter
            self.by_parameter.setdefault(place, {})[p] = changed
        self.installed: list[Replacement] = []

    def install(self) -> None:
        for (module, key), lasts in self.by_parameter.items():
            stored: Any = module._parameters[key]
            parts = {p: _columns(p.rows(stored.detach()), *changed) for p, changed in lasts.items()}
            self.installed.append(Replacement(module, key, parts))
            self.installed[-1].install()

    def remove(self) -> None:
        while self.installed:
            self.installed.pop().remove()


def _columns(W: torch.Tensor, channels: torch.Tensor, refit: torch.Tensor | None) -> torch.Tensor:
    index = channels.to(W.device)
    return torch.zeros_like(W).index_copy(1, index, W[:, index] if refit is None else refit.to(W))
