"""Where a decoder keeps what its layers carry from token to token: one table, a row for each kind of cache.

Keys and values of attention are not among it: they grow with the text, and nothing in them changes afterwards.
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

    A `convolution` holds the last inputs of a short kernel, so that what enters leaves again; anything else is a
    recurrent state.
    """

    place: Any
    key: Any
    convolution: bool

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.place[self.key]
        return value

    def write(self, value: torch.Tensor) -> None:
        self.place[self.key] = value


# What a layer with this index carries, of the module and of the cache (None: the model keeps everything itself).
Finder = Callable[[nn.Module, int, Any], Iterator[Carried]]


def _cache_layers(layer: nn.Module, index: int, cache: Any) -> Iterator[Carried]:
    """transformers' caches: a layer holds recurrent and convolution states by number."""
    entries = getattr(cache, "layers", [])
    if index < len(entries) and isinstance(entries[index], LinearAttentionCacheLayerMixin):
        for states, convolution in ((entries[index].recurrent_states, False), (entries[index].conv_states, True)):
            yield from (Carried(states, key, convolution) for key, value in states.items() if value is not None)


def _linear_cache(layer: nn.Module, index: int, cache: Any) -> Iterator[Carried]:
    """MiniMax: one sum of `k vᵀ` a layer beside the keys and values, an empty list in layers of attention."""
    states = getattr(cache, "linear_cache", [])
    if index < len(states) and isinstance(states[index], torch.Tensor):
        yield Carried(states, index, False)


def _attributes(layer: nn.Module, index: int, cache: Any) -> Iterator[Carried]:
    """RecurrentGemma: attributes of the modules themselves, which stay there after the forward."""
    for name, convolution in (("recurrent_states", False), ("conv1d_state", True)):
        for module in layer.modules():
            if isinstance(vars(module).get(name), torch.Tensor):
                yield Carried(vars(module), name, convolution)


KEPT: tuple[Finder, ...] = (_cache_layers, _linear_cache, _attributes)
# Families whose forward makes no cache of its own that it hands back.
_GIVEN_ONE = ("recurrent_gemma",)
# Families whose state has another scale at every token: a running maximum is divided out of it.
_RESCALED = ("rwkv", "xlstm")


def first_cache(model: PreTrainedModel, structure: Structure) -> dict[str, Any]:
    """What the first forward has to be given beside `use_cache` so that the states can be found after it.

    Raises LyapunovPruneError for a family whose states cannot be compared.
    """
    if structure.model_type in _RESCALED:
        raise LyapunovPruneError(
            f"the recurrent state of {structure.model_type} is divided by a running maximum, so that two states have "
            "different scales; measure --along depth"
        )
    return {"past_key_values": DynamicCache(config=model.config)} if structure.model_type in _GIVEN_ONE else {}


def carried_states(structure: Structure, cache: Any) -> dict[int, Carried]:
    """Per layer the state that it carries: the recurrent one, or the convolution's where there is no other.

    Raises LyapunovPruneError for a model that carries none.
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
    """Make row i of everything in the cache, and of states in modules, what row `rows[i]` was."""
    if cache is not None:
        cache.reorder_cache(rows)
    for _, states in _all_states(structure, cache, KEPT[1:]):  # the first are among the cache's own
        for state in states:
            state.write(state.read().index_select(0, rows.to(state.read().device)))


def forget_states(structure: Structure) -> None:
    """Empty the states that modules hold; those in a cache go with it."""
    for _, states in _all_states(structure, None, (_attributes,)):
        for state in states:
            state.write(None)  # type: ignore[arg-type]


def _all_states(
    structure: Structure, cache: Any, kept: tuple[Finder, ...] = KEPT
) -> Iterator[tuple[int, list[Carried]]]:
    for index, layer in enumerate(structure.layers):
        yield index, [state for finder in kept for state in finder(layer, index, cache)]
