"""The kind of each layer of a decoder, and the period after which kinds repeat."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lyapunov_prune.models.families import POSITION_ATTRIBUTES
from lyapunov_prune.models.structure import Structure


@dataclass(frozen=True)
class LayerKinds:
    """The kind of every layer, numbered in order of appearance.

    `period` is the smallest p such that the layers hold at least two whole periods and layer i + p is of the kind of
    layer i: 1 if all layers are alike, None if the kinds do not repeat.
    """

    kinds: tuple[int, ...]

    @property
    def period(self) -> int | None:
        for p in range(1, len(self.kinds) // 2 + 1):
            if self.kinds[p:] == self.kinds[:-p]:
                return p
        return None

    def survives(self, kept: tuple[int, ...]) -> bool:
        """Whether every kept layer is of the kind that its new number has in the original model."""
        return tuple(self.kinds[i] for i in kept) == self.kinds[: len(kept)]


def find_kinds(structure: Structure) -> LayerKinds:
    """The kinds of a model's layers.

    Two layers are of one kind if they consist of the same modules with parameters of the same shapes and equal
    integers, booleans and strings; floats are ignored, since a scale may follow the depth. If these kinds do not repeat
    (some models begin with one or two dense layers), the config's `layer_types` are used if they do.
    """
    built = LayerKinds(_numbered(_description(layer) for layer in structure.layers))
    named = getattr(structure.config, "layer_types", None)
    if built.period is None and isinstance(named, list | tuple) and len(named) == structure.num_layers:
        listed = LayerKinds(_numbered(named))
        return listed if (listed.period or 1) > 1 else built
    return built


def _numbered(descriptions: Iterable[Hashable]) -> tuple[int, ...]:
    seen: dict[Hashable, int] = {}
    return tuple(seen.setdefault(description, len(seen)) for description in descriptions)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The numbers, words and None among a module's public attributes, without its position."""
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and key not in POSITION_ATTRIBUTES and key[0] != "_"
    }


def _description(layer: nn.Module) -> Hashable:
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)),
            tuple(item for item in sorted(plain_attributes(module).items()) if not isinstance(item[1], float)),
        )
        for name, module in layer.named_modules()
    )
