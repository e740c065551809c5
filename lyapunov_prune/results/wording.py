"""The wording of answers: lists of layers, a small bar per layer, intervals."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_BARS = "▁▂▃▄▅▆▇█"
_GROUP = 10  # bars between two layer numbers


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of every run of consecutive numbers, in order."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def ranges(layers: Iterable[int], to: str = "–") -> str:
    """Sorted layers with runs of three or more joined: `0, 22, 24–26`; `none` for none."""
    parts = [f"{a}{to}{b}" if b > a + 1 else ", ".join(map(str, dict.fromkeys((a, b)))) for a, b in runs(layers)]
    return ", ".join(parts) or "none"


def layers_of(numbers: Iterable[int], to: str = "–") -> str:
    """`layer 2`, or `layers 0, 24–26`."""
    some = list(numbers)
    return f"layer{'s' * (len(some) != 1)} {ranges(some, to)}"


def bars(values: np.ndarray) -> str:
    """One bar per layer, with the layer number before every tenth; `·` if a value is not finite.

    Heights are logarithmic if all values are positive, else linear.
    """
    known = np.isfinite(values)
    heights = np.zeros(len(values), dtype=int)
    if known.any():
        shown = values[known]
        scaled = np.log(shown) if (shown > 0).all() else shown
        heights[known] = np.round((scaled - scaled.min()) / (np.ptp(scaled) or 1.0) * (len(_BARS) - 1)).astype(int)
    drawn = [_BARS[height] if seen else "·" for height, seen in zip(heights, known, strict=True)]
    return " ".join(f"{at} {''.join(drawn[at : at + _GROUP])}" for at in range(0, len(drawn), _GROUP))


def number(value: float) -> str:
    """`value` with four digits; one of up to seven before the point has them all, and no exponent."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def between(low: float, high: float, digits: int = 3) -> str:
    """A 95 % interval of a loss over windows in words; if it is NaN, that there are too few windows for one."""
    if np.isfinite([low, high]).all():
        return f"95 % interval {low:.{digits}g} to {high:.{digits}g}"
    return "no interval: too few windows"
