"""Which pairs of counts are recovered, and in which order: chains that remove one more part at every point."""

from __future__ import annotations

Pair = tuple[int, int]  # attentions and activations removed
DENSE: Pair = (0, 0)
# What each chain removes, cyclically: the two axes, and 2:1 mixtures of the types between them.
CHAINS = ("a", "g", "aag", "gga")
LEAST_REACH = 4  # with shorter chains no degree above one could be tried


def walk(chain: str, reach: int, most: Pair) -> list[Pair]:
    """The points of one of CHAINS up to `reach`; the k-th point removes k parts.

    Where a type is used up (`most`), a mixture continues with the other type and an axis ends.
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
    """Every point of CHAINS with the point it inherits from, which comes earlier: 28 points for a reach of 8."""
    parents: dict[Pair, Pair] = {}
    for chain in CHAINS:
        points = walk(chain, reach, most)
        for before, point in zip([DENSE, *points], points, strict=False):
            parents.setdefault(point, before)
    return parents


def rivals(reach: int, most: Pair, allowed: set[Pair]) -> list[Pair]:
    """The first point of each chain within the budget, or its last point: the decision is made among such points."""
    found: dict[Pair, None] = {}
    for walked in (walk(chain, reach, most) for chain in CHAINS):
        if walked:
            found[next((pair for pair in walked if pair in allowed), walked[-1])] = None
    return list(found)
