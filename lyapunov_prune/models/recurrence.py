"""The states that a decoder's layers carry from token to token, in one table with a row for each kind of cache.

Keys and values of attention are not among them: they grow with the text and never change afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.structure import Structure


@dataclass(frozen=True, eq=False)
class Carried:
    """One tensor (rows × …) of a layer: `place[key]`, replaced at every token or changed in place.

    A `convolution` holds the last inputs of a short kernel, so an input drops out again after some tokens. All others
    are recurrent states.
    """

    place: Any
    key: Any
    convolution: bool

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.place[self.key]
        return value

    def write(self, value: torch.Tensor) -> None:
        self.place[self.key] = value


# Yields what the layer with this index carries, in the module or in the cache (None: no cache, all is in the modules).
Finder = Callable[[nn.Module, int, Any], Iterator[Carried]]


def _cache_layers(layer: nn.Module, index: int, cache: Any) -> Iterator[Carried]:
    """transformers' caches: recurrent and convolution states by layer."""
    entries = getattr(cache, "layers", [])
    if index < len(entries) and isinstance(entries[index], LinearAttentionCacheLayerMixin):
        for states, convolution in ((entries[index].recurrent_states, False), (entries[index].conv_states, True)):
            yield from (Carried(states, key, convolution) for key, value in states.items() if value is not None)


def _linear_cache(layer: nn.Module, index: int, cache: Any) -> Iterator[Carried]:
    """MiniMax: per layer a sum of `k vᵀ` beside the keys and values; an empty list for layers with attention."""
    states = getattr(cache, "linear_cache", [])
    if index < len(states) and isinstance(states[index], torch.Tensor):
        yield Carried(states, index, False)


def _attributes(layer: nn.Module, index: int, cache: Any) -> Iterator[Carried]:
    """RecurrentGemma: attributes of modules, which stay there after the forward."""
    for name, convolution in (("recurrent_states", False), ("conv1d_state", True)):
        for module in layer.modules():
            if isinstance(vars(module).get(name), torch.Tensor):
                yield Carried(vars(module), name, convolution)


KEPT: tuple[Finder, ...] = (_cache_layers, _linear_cache, _attributes)
# Families whose forward returns no cache unless it is given one.
_GIVEN_ONE = ("recurrent_gemma",)
# Families that rescale their state at every token, by a running maximum.
_RESCALED = ("rwkv", "xlstm")


def first_cache(model: PreTrainedModel, structure: Structure) -> dict[str, Any]:
    """Arguments for the first forward, besides `use_cache`, that make its states available afterwards.

    Raises LyapunovPruneError for a family whose states cannot be compared.
    """
    if structure.model_type in _RESCALED:
        raise LyapunovPruneError(
            f"the recurrent state of {structure.model_type} is divided by a running maximum, so that two states have "
            "different scales; measure --along depth"
        )
    return {"past_key_values": DynamicCache(config=model.config)} if structure.model_type in _GIVEN_ONE else {}


def carried_states(structure: Structure, cache: Any) -> dict[int, Carried]:
    """The state that each layer carries: the recurrent one, or else that of the convolution.

    Raises LyapunovPruneError for a model without any.
    """
    found: dict[int, Carried] = {}
    for index, states in _all_states(structure, cache):
        if states:
            found[index] = next((state for state in states if not state.convolution), states[0])
    if not found:
        raise LyapunovPruneError(
            f"no layer of {structure.model_type} has a recurrent state: its cache holds keys and values, where an "
            "error neither shrinks nor grows; measure --along depth"
        )
    return found


def select_rows(structure: Structure, cache: Any, rows: torch.Tensor) -> None:
    """In the cache and in states of modules, set each row i to the former row `rows[i]`."""
    if cache is not None:
        cache.reorder_cache(rows)
    for _, states in _all_states(structure, cache, KEPT[1:]):  # those of the cache are reordered above
        for state in states:
            state.write(state.read().index_select(0, rows.to(state.read().device)))


def forget_states(structure: Structure) -> None:
    """Clear the states in modules; those in a cache are dropped with it."""
    for _, states in _all_states(structure, None, (_attributes,)):
        for state in states:
            state.write(None)  # type: ignore[arg-type]


def _all_states(
    structure: Structure, cache: Any, kept: tuple[Finder, ...] = KEPT
) -> Iterator[tuple[int, list[Carried]]]:
    for index, layer in enumerate(structure.layers):
        yield index, [state for finder in kept for state in finder(layer, index, cache)]
