"""Which pairs of counts are recovered, and in which order: chains, along which one more part goes at every point."""

from __future__ import annotations

Pair = tuple[int, int]  # attentions and activations removed
DENSE: Pair = (0, 0)
# What each step of a chain removes, over and over: both axes, and between them two of a type to one of the other.
CHAINS = ("a", "g", "aag", "gga")
LEAST_REACH = 4  # fewer steps a chain leave no degree above one to try


def walk(chain: str, reach: int, most: Pair) -> list[Pair]:
    """The points of one of CHAINS, whose k-th removes k, to `reach`.

    Where a type is used up (`most`) it goes on with the other; an axis ends there.
    """
    pair, points = DENSE, []
    for step in range(reach):
        options = [chain[step % len(chain)], *sorted(set(chain))]
        nexts = [(pair[0] + (kind == "a"), pair[1] + (kind == "g")) for kind in options]
        new = next((n for n in nexts if n[0] <= most[0] and n[1] <= most[1]), None)
        if new is None:
            break
        points.append(pair := new)
    return points


def chains(reach: int, most: Pair) -> dict[Pair, Pair]:
    """Every point of CHAINS, and the point that it inherits from, which comes before it: 28 for a reach of 8."""
    parents: dict[Pair, Pair] = {}
    for chain in CHAINS:
        points = walk(chain, reach, most)
        for before, point in zip([DENSE, *points], points, strict=False):
            parents.setdefault(point, before)
    return parents


def reach_of(allowed: set[Pair]) -> int:
    """How many go at most before the budget is met, whatever types they are of."""
    frontier = [(a, g) for a, g in allowed if (a - 1, g) not in allowed and (a, g - 1) not in allowed]
    return max(a + g for a, g in frontier)


def rivals(reach: int, most: Pair, allowed: set[Pair]) -> list[Pair]:
    """Of each chain the first point within the budget, else its last: between such points the choice is made."""
    found: dict[Pair, None] = {}
    for walked in (walk(chain, reach, most) for chain in CHAINS):
        if walked:
            found[next((pair for pair in walked if pair in allowed), walked[-1])] = None
    return list(found)
