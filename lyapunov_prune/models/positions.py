"""Rotary positions that depend on the length of the text: longrope rotates all tokens differently in a long text.

In such a model all earlier keys change beyond the length where it switches. A cache filled before is stale, and two
texts on either side of the switch cannot share a forward. Other rotary types of transformers keep their frequencies up
to the longest context in the config.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Any


def switches(config: Any) -> tuple[int, ...]:
    """The lengths, in order, beyond which a text uses other rotary frequencies; `config` is a text config."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]  # one for each type of layer
    found = {
        each["original_max_position_embeddings"]
        for each in nested or [parameters]
        if each.get("rope_type") == "longrope"
    }
    return tuple(sorted(found))


def rotation(config: Any, length: int) -> int:
    """A number that is equal for two lengths if and only if their texts use the same rotary frequencies."""
    return bisect_left(switches(config), length)


def stretches(config: Any, first: int, last: int) -> list[tuple[int, int]]:
    """The lengths `first … last` as ranges, both ends included, with one rotation each."""
    found = [list(some) for _, some in groupby(range(first, last + 1), lambda length: rotation(config, length))]
    return [(some[0], some[-1]) for some in found]


def alike(config: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Indices into `lengths`, shortest first, in groups of one rotation: texts that may share a forward."""
    places = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [list(some) for _, some in groupby(places, lambda i: rotation(config, lengths[i]))]
