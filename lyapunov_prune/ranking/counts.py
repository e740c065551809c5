"""How many layers, or parts of layers, can be removed, and which. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Literal

from lyapunov_prune.errors import LyapunovPruneError

What = Literal["layers", "attention", "activation", "width", "experts"]


def count_of(remove: int | float, of: int) -> int:
    """`remove` as a number: an int is returned as it is, a float is a share of `of`, rounded, at least 1."""
    return int(remove) if isinstance(remove, Integral) else max(1, round(remove * of))


def require_count(remove: int, layers: int, what: str = "layers", having: int | None = None) -> None:
    """Raise LyapunovPruneError unless `what` of `remove` of the `layers` can be removed; one whole layer must stay.

    `having` is the number of layers that have such a part, if not all do.
    """
    most = layers - 1 if what == "layers" else layers if having is None else having
    if not 1 <= remove <= most:
        remedy = f"give 1 to {most}" if most else "give another model"
        of = f"{layers} layers" if having is None else f"{layers} layers, of which {having} have {what} to leave out"
        raise LyapunovPruneError(f"cannot remove {remove} of {of}; {remedy}")


def free_layers(layers: int, protect: Sequence[int]) -> tuple[int, ...]:
    """The layers that may be removed: all but `protected_layers`. Raises as that does."""
    kept = protected_layers(layers, protect)
    return tuple(layer for layer in range(layers) if layer not in kept)


def protected_layers(layers: int, protect: Sequence[int], remove: int = 1) -> tuple[int, ...]:
    """The layers of `protect` (counted from the end if negative), ascending, each once.

    Raises LyapunovPruneError for a layer that does not exist, and if fewer than `remove` other layers are left.
    """
    kept = tuple(sorted({layer % layers for layer in protect}))
    left = layers - len(kept)
    wrong = [f"there is no layer {i} to protect, of 0 to {layers - 1}" for i in protect if not -layers <= i < layers]
    if left < remove:
        wrong.append(f"{left} layers are left to remove beside the protected, and {remove} should go")
    if wrong:
        raise LyapunovPruneError(f"{wrong[0]}; protect fewer, or others")
    return kept


def nothing_within(what: str, aim: str, first: str, cost: float) -> LyapunovPruneError:
    """The refusal of an aim that even the first removal misses: `first` names it, and `cost` is what it costs."""
    return LyapunovPruneError(f"no {what} can be removed with {aim}: {first} costs {cost:.3g}; allow that or more")


def search_budget(layers: int, remove: int, mend: bool = False) -> float:
    """The default budget of `best` in forwards: five for the criteria, and one per 32 swaps that a set has.

    With mending it is three times as much, a third of it for the search.
    """
    return (3 if mend else 1) * (5 + remove * (layers - remove) / 32)


def most_not_over(is_over: Callable[[int], bool], most: int) -> int:
    """The largest count in 1 … `most` for which `is_over` is false, 0 if it is true for 1; it must be monotone."""
    return least_count(is_over, most + 1, max(1, most // 8)) - 1


def least_count(holds: Callable[[int], bool], most: int, first: int) -> int:
    """The least count in 1 … `most` for which `holds` is true. It must be true for `most`, and monotone.

    `first` is tried first; from there the steps double, then halve.
    """
    low, high, step = 0, most, 1  # invariant: `holds` is false for `low` and true for `high`
    at = first
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        if holds(at):
            high, at = at, at - step
        else:
            low, at = at, at + step
        step *= 2
        if not low < at < high:
            at = (low + high) // 2
    return high
