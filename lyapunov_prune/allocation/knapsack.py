"""One choice for each of several things: the least total cost within a budget."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np

TOLERANCE = 1e-9  # of the cost over the cheapest choices: how far the choices that are found may be from the best
_SCALE = 1e4  # of the largest cost: HiGHS ends within 1e-6 of the least sum, in whatever unit


def cheapest(cost: np.ndarray, weight: np.ndarray, budget: float) -> np.ndarray:
    """The index of the choice of each thing, (L,) int: `min Σ_l cost[l, k_l]` subject to `Σ_l weight[l, k_l] ≤ budget`.

    `cost` and `weight` are (L × K); an infinite cost rules a choice out. Solved by `scipy.optimize.milp` to 1e-9 of
    what it costs over the cheapest choices. Raises LyapunovPruneError for a budget below the lightest choices.
    """
    rows = np.arange(len(cost))
    pick = np.where(np.isfinite(cost), weight, np.inf).argmin(1)
    if weight[rows, pick].sum() > budget * (1 + 1e-12):
        raise LyapunovPruneError(f"the least is {weight[rows, pick].sum():g}, above {budget:g}; give more")
    above = cost - cost.min(1, keepdims=True)  # what is paid over the cheapest choices
    # The solver's tolerances are absolute, so the unit is the cost that is already reached.
    while (total := above[rows, pick].sum()) > 0:
        found = _cheaper(above, weight / max(budget, 1e-300), pick)
        if above[rows, found].sum() >= total * (1 - TOLERANCE):
            break
        pick = found
    return pick


def _cheaper(cost: np.ndarray, share: np.ndarray, pick: np.ndarray) -> np.ndarray:
    """The index of every choice with the least sum of `cost`, without those that cost more than all of `pick`.

    `share` is the part of the budget that each choice takes.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import block_diag

    (L, K), most = cost.shape, cost[np.arange(len(cost)), pick].sum()
    allowed = cost <= most
    with _nothing_printed():
        found = milp(
            np.where(allowed, cost, 0).ravel() * (_SCALE / most),
            integrality=np.ones(L * K),
            bounds=Bounds(0, allowed.ravel()),
            constraints=[
                LinearConstraint(block_diag([np.ones((1, K))] * L), 1, 1),
                LinearConstraint(share.ravel(), -np.inf, 1 + 1e-12),
            ],
            options={"mip_rel_gap": 0, "time_limit": 60},
        )
    if found.x is None:
        raise LyapunovPruneError(f"no choice was found ({found.message}); give another budget")
    return found.x.reshape(L, K).argmax(1)


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Drop what C code prints on stdout within the block: HiGHS has lines that its options do not turn off."""
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else lambda _: None
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        flush(None)
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
