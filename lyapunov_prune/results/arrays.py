"""Checks of arrays in results: the right number of entries, in the right range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lyapunov_prune.errors import LyapunovPruneError


def require_array(
    name: str,
    values: np.ndarray,
    shape: tuple[int, ...],
    *,
    least: float = 0.0,
    most: float = np.inf,
    finite: bool = True,
) -> None:
    """Raise LyapunovPruneError unless `values` has this shape and lies in `least … most`.

    NaN (and infinity, where `most` allows it) is only allowed if not `finite`.
    """
    wanted, given = (" × ".join(map(str, s)) or "no array" for s in (shape, np.shape(values)))
    why = f"{given} numbers where the model has {wanted}" if np.shape(values) != shape else ""
    if not why:
        flat = np.ravel(values)
        wrong = (flat < least) | (flat > most) | (~np.isfinite(flat) & finite)
        if wrong.any():
            place = int(np.argmax(wrong))
            why = f"{flat[place]:g} at place {place} is not {'finite ' * finite}from {least:g} to {most:g}"
    require_fitting(not why, f"{name}: {why}")


def require_fitting(fits: bool, what: str) -> None:
    """Raise LyapunovPruneError, which says `what` is wrong with a record, unless its fields fit each other."""
    if not fits:
        raise LyapunovPruneError(f"{what}; measure or make it again")


def each_once(name: str, layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`layers`, which are those of `name`, ascending.

    Raises LyapunovPruneError unless they are layers of a model of `count`, each once.
    """
    known, listed = range(count), list(layers)
    for i in listed:
        if isinstance(i, bool | float) or i not in known:
            raise LyapunovPruneError(f"{name}: there is no layer {i}; the {count} layers are 0 to {count - 1}")
        if listed.count(i) > 1:
            raise LyapunovPruneError(f"{name}: layer {i} is named {listed.count(i)} times; name each once")
    return tuple(sorted(int(i) for i in layers))


def require_layers(name: str, layers: Iterable[int], count: int) -> None:
    """Raise LyapunovPruneError for a layer that a model of `count` layers does not have."""
    outside = next((layer for layer in layers if not 0 <= layer < count), None)
    require_fitting(outside is None, f"{name}: there is no layer {outside} among {count}")
