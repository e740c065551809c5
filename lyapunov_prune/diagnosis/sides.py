"""A dense model and a file of it side by side: the matrices of both under one name, and what the file calls them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from lyapunov_prune.diagnosis.finding import unnumbered
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf import gguf_file
from lyapunov_prune.models.gguf_tensors import names_in_file
from lyapunov_prune.models.streamed import layer_held
from lyapunov_prune.models.structure import model_name


@dataclass(frozen=True)
class TensorPlace:
    """A matrix or vector of the file: the tensor's name in the model in memory, its layer there, and its expert.

    `own` is the layer's number in the dense model. `expert` is None unless the tensor holds one matrix for each.
    """

    name: str
    layer: int | None
    own: int | None
    expert: int | None = None

    @property
    def role(self) -> str:
        """What its peers in other layers and experts have in common."""
        return unnumbered(self.name)


@dataclass(frozen=True, eq=False)
class Sides:
    """Both models; layer i of `file` is layer `layers[i]` of `dense`."""

    dense: Decoder
    file: Decoder
    layers: tuple[int, ...]

    @cached_property
    def places(self) -> tuple[TensorPlace, ...]:
        """Every matrix and vector that both have in one shape."""
        mine, theirs = (side.model.state_dict() for side in (self.dense, self.file))
        return tuple(
            place
            for name, tensor in theirs.items()
            for place in self._places(name, tensor)
            if (own := mine.get(self.dense_name(place))) is not None and own.shape == tensor.shape
        )

    def untied(self) -> Iterator[TensorPlace]:
        """The places, one for all that are tied in both models."""
        mine, theirs = (side.model.state_dict(keep_vars=True) for side in (self.dense, self.file))
        seen: set[tuple[int, int, int | None]] = set()
        for place in self.places:
            key = id(mine[self.dense_name(place)]), id(theirs[place.name]), place.expert
            if key not in seen:
                seen.add(key)
                yield place

    @cached_property
    def alike(self) -> dict[tuple[int, ...], list[str]]:
        """The names of the dense model's tensors by shape."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name, tensor in self.dense.model.state_dict().items():
            if tensor.is_floating_point():
                found.setdefault(tuple(tensor.shape), []).append(name)
        return found

    def dense_name(self, place: TensorPlace) -> str:
        """The tensor's name in the dense model."""
        if place.layer is None:
            return place.name
        path = self.file.structure.layers_path
        return f"{self.dense.structure.layers_path}.{place.own}{place.name[len(f'{path}.{place.layer}') :]}"

    def pair(self, place: TensorPlace) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrix in the dense model and in the file, float32 on the CPU, (rows, columns) or (n,)."""
        return read(self.dense, self.dense_name(place), place.expert), read(self.file, place.name, place.expert)

    def by_layer(self, places: Iterable[TensorPlace]) -> Iterator[TensorPlace]:
        """The places in turn, each with its layer in memory in both models, even if they are streamed."""
        for (own, layer), some in groupby(places, lambda place: (place.own, place.layer)):
            with ExitStack() as stack:
                for side, number in (self.dense, own), (self.file, layer):
                    if number is not None and side.stream is not None:
                        stack.enter_context(layer_held(side.model, number))
                yield from some

    @property
    def is_gguf(self) -> bool:
        """Whether the file is a GGUF file."""
        return gguf_file(model_name(self.file.model)) is not None

    def away(self, name: str) -> bool:
        """Whether the dense model's tensor is in files alone at the moment."""
        return tensor_of(self.dense, name).is_meta

    def told(self, place: TensorPlace) -> str:
        """The tensor's name as the file has it."""
        return self._names.get(place.name, place.name)

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names in a GGUF file by those in the model; none for another kind of file."""
        with suppress(NotImplementedError, KeyError):
            return names_in_file(self.file.model) if self.is_gguf else {}
        return {}

    def _places(self, name: str, tensor: torch.Tensor) -> Iterator[TensorPlace]:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        layer = self.file.structure.layer_of(name)
        own = None if layer is None else self.layers[layer]
        experts: Sequence[int | None] = range(len(tensor)) if tensor.ndim == 3 else (None,)
        yield from (TensorPlace(name, layer, own, expert) for expert in experts)


def tensor_of(side: Decoder, name: str) -> torch.Tensor:
    """The parameter or buffer of the model by this name; on the meta device where it is in files alone."""
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(side.model.get_submodule(path), last).detach()
    return tensor


def read(side: Decoder, name: str, expert: int | None = None) -> torch.Tensor:
    """A tensor of the model that is in memory, as float32 on the CPU, with at most two axes."""
    tensor = tensor_of(side, name)
    tensor = (tensor if expert is None else tensor[expert]).to("cpu", torch.float32)
    return tensor if tensor.ndim < 3 else tensor.reshape(len(tensor), -1)
