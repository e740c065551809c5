"""Every compression method under one name and one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.masks import Pattern
from lyapunov_prune.compression.methods.balanced import balanced
from lyapunov_prune.compression.methods.magnitude import sparsify
from lyapunov_prune.compression.methods.rtn import round_to_nearest
from lyapunov_prune.compression.methods.sparsegpt import sparsegpt
from lyapunov_prune.compression.methods.svd import basis, truncate
from lyapunov_prune.compression.methods.wanda import wanda
from lyapunov_prune.compression.methods.weight_only import weight_only
from lyapunov_prune.compression.methods.whitened_svd import whitened
from lyapunov_prune.compression.table import METHODS
from lyapunov_prune.errors import LyapunovPruneError

# `function(W, statistics, amount, **options)`; the options are those of `_OPTIONS` for the kind of amount.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "magnitude": lambda W, s, amount, pattern: sparsify(W, amount, pattern),
    "weight-only": lambda W, s, amount, pattern: weight_only(W, amount, pattern),
    "wanda": lambda W, s, amount, pattern: wanda(W, s.norms, amount, pattern),
    "sparsegpt": lambda W, s, amount, pattern: sparsegpt(W, s.gram, amount, pattern),
    "svd": lambda W, s, amount: truncate(W, int(amount), basis(W)),
    "whitened-svd": lambda W, s, amount: whitened(W, s.gram, int(amount)),
    "balanced": lambda W, s, amount: balanced(W, s.gram, s.sensitivity, int(amount)),
    "rtn": lambda W, s, amount, **grid: round_to_nearest(W, int(amount), **grid),
}
_FIELDS = {"nothing": (), "norms": ("norms",), "gram": ("gram",), "sensitivity": ("gram", "sensitivity")}
_OPTIONS: dict[str, tuple[str, ...]] = {"sparsity": ("pattern",), "bits": ("group_size", "symmetric")}


class RankError(LyapunovPruneError):
    """No rank is small enough for the sparsity that a matrix is to have."""


def compressed(
    method: str,
    W: torch.Tensor,
    statistics: Statistics | None,
    amount: float,
    *,
    pattern: Pattern | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
) -> torch.Tensor:
    """`W` (m × n) compressed by a method of METHODS: same shape, dtype and device, `W` untouched.

    `amount` is a sparsity in [0, 1], a rank of 1 or more, or 2 to 8 bits. `pattern` (keep, of) goes with a sparsity,
    `group_size` and `symmetric` with bits. The result may share the memory of `W` where nothing changes.

    Raises LyapunovPruneError for an unknown method, an option it does not have, an amount out of range, statistics
    that are missing, of another shape or not finite, and for weights that are not finite or no matrix.
    """
    if method not in METHODS:
        raise LyapunovPruneError(f"unknown method {method!r}; give one of {', '.join(METHODS)}")
    needs, kind = METHODS[method].needs, METHODS[method].amount
    require_in_range(method, kind, amount)
    options: dict[str, Any] = {"pattern": pattern, "group_size": group_size, "symmetric": symmetric}
    own = _OPTIONS.get(kind, ())
    for option, value in options.items():
        if value is not None and value is not False and option not in own:
            takers = ", ".join(name for name, other in METHODS.items() if option in _OPTIONS.get(other.amount, ()))
            raise LyapunovPruneError(f"method {method} has no {option}; leave it out, or take one of {takers}")
    if W.ndim != 2 or not W.is_floating_point():
        raise LyapunovPruneError(f"{method} compresses a real matrix, not {W.dtype} of shape {tuple(W.shape)}")
    # The extremes are NaN where any entry is; a whole mask of what is finite takes fifty times as long.
    if W.numel() and not bool(torch.stack(torch.aminmax(W)).isfinite().all()):
        raise LyapunovPruneError("the matrix holds NaN or infinity; check the weights")
    for field in _FIELDS[needs]:
        known = getattr(statistics, field, None)
        if known is None:
            raise LyapunovPruneError(
                f"method {method} needs calibration statistics with {field}; collect them, or take method magnitude"
            )
        if not bool(known.isfinite().all()):
            raise LyapunovPruneError(f"the {field} of the calibration holds NaN or infinity; check weights and text")
    return _FUNCTIONS[method](W.detach(), statistics, amount, **{option: options[option] for option in own})


def rank_for(shape: Sequence[int], sparsity: float) -> int | None:
    """The largest `r` with `r (m + n) ≤ (1 − sparsity) m n`: two factors that hold no more than the entries kept.

    None for a matrix that no two factors are smaller than, as one of a single row, which stays as it is. Raises
    LyapunovPruneError for a sparsity outside [0, 1], and RankError where not even rank 1 is that small.
    """
    require_in_range("a rank", "sparsity", sparsity)
    m, n = shape
    if m + n >= m * n:
        return None
    # Not floor alone: (1 − 0.9) · 400 is 39.99… in float64.
    rank = math.floor((1 - sparsity) * m * n / (m + n) + 1e-9)
    if rank == 0:
        limit = math.floor((1 - (m + n) / (m * n)) * 1e4) / 1e4
        raise RankError(f"no rank makes a {m} × {n} matrix {sparsity:g} smaller; give a sparsity of at most {limit:g}")
    return rank


def require_in_range(name: str, kind: str, amount: float) -> None:
    """Raise LyapunovPruneError for an amount that no matrix can be compressed to."""
    right, given = {
        "sparsity": (0 <= amount <= 1, "a sparsity from 0 to 1"),
        "rank": (amount >= 1 and amount % 1 == 0, "a whole rank of 1 or more"),
        "bits": (amount in range(2, 9), "2 to 8 whole bits"),
    }[kind]
    if not right:
        raise LyapunovPruneError(f"{name} cannot take {kind} {amount:g}; give {given}")
