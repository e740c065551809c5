"""The base classes of compression methods, which replace a matrix by one of the same shape. Imports no torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.compression.grids import WIDTHS, Steps, stepped
from lyapunov_prune.compression.masks import Pattern, as_pattern
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import torch
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.registry import Choice

# The fields of Statistics that a method needs, by its `needs`.
FIELDS = {
    "nothing": (),
    "norms": ("norms",),
    "gram": ("gram",),
    "magnitudes": ("gram", "magnitudes"),
    "sensitivity": ("gram", "sensitivity"),
}


class RankError(LyapunovPruneError):
    """No rank is small enough for the sparsity asked of a matrix."""


class Method(Choice):
    """How one matrix is compressed. A method is a subclass in a file of its own and a row in `table.METHODS`.

    `unit` is the unit of its amount: a "sparsity" from 0 to 1, a "rank" of 1 or more, or "bits", 2 to 8 or `TERNARY`.
    `needs` names what calibration has to collect for it, a key of `FIELDS`.
    """

    unit: ClassVar[str]
    needs: ClassVar[str] = "nothing"

    @abstractmethod
    def compress(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        """`W` (m × n) compressed: same shape, dtype and device. `W` is not changed; it is returned if nothing changes.

        `__call__` has checked that the matrix and the needed statistics are finite and that the amount is in range.
        """

    def __call__(self, W: torch.Tensor, amount: float, statistics: Statistics | None = None) -> torch.Tensor:
        """`compress` with checked arguments.

        Raises LyapunovPruneError for an amount out of range, statistics that are missing, of another shape or not
        finite, and weights that are not finite or not a matrix.
        """
        require_in_range(self.name, self.unit, amount)
        if W.ndim != 2 or not W.is_floating_point():
            raise LyapunovPruneError(f"{self.name} compresses a real matrix, not {W.dtype} of shape {tuple(W.shape)}")
        require_numbers(W, "the matrix")
        for field in FIELDS[self.needs]:
            known = getattr(statistics, field, None)
            size = W.shape[0] if field == "sensitivity" else W.shape[1]
            if known is None or {*known.shape} != {size}:
                given = "are missing" if known is None else f"have shape {tuple(known.shape)}"
                raise LyapunovPruneError(
                    f"method {self.name} needs calibration statistics, and {field} of {size} features {given}; collect "
                    "them, or take method magnitude"
                )
            require_numbers(known, f"{field} of the calibration")
        return self.compress(W.detach(), amount, statistics)

    def needed(self, statistics: Statistics | None) -> list[torch.Tensor]:
        """The statistics that the method `needs`, which `__call__` has checked, in the order of `FIELDS`."""
        return [getattr(statistics, field) for field in FIELDS[self.needs]]


class Sparsifier(Method):
    """A method that sets entries to zero; a `pattern` (keep, of) keeps `keep` of every `of` inputs of a row."""

    pattern: Pattern | None = None

    unit = "sparsity"

    def __post_init__(self) -> None:
        super().__post_init__()
        as_pattern(self.pattern)


class LowRank(Method):
    """A method that lowers the rank of a matrix."""

    unit = "rank"


class Rounder(Method):
    """A method that moves weights to the points of a grid, one per row or per `group_size` inputs of a row.

    With `symmetric` the grids lie around 0 and need no zero point, as packed formats require (`grids.stepped`).
    `on_grid`: whether the result lies on the grids, so that integers and scales can store it.
    """

    group_size: int | None = None
    symmetric: bool = False

    unit = "bits"
    on_grid: ClassVar[bool] = True

    def steps(self, W: torch.Tensor, bits: float) -> Steps:
        """The grids of `W` (m × n). If `on_grid`, the result of `compress` lies on them up to rounding to its dtype."""
        return stepped(W, bits, self.group_size, self.symmetric)


def rank_for(shape: Sequence[int], sparsity: float) -> int | None:
    """The largest `r` with `r (m + n) ≤ (1 − sparsity) m n`: two factors have no more entries than are kept.

    None for a matrix that two factors cannot make smaller, for example a single row; it is not changed. Raises
    LyapunovPruneError for a sparsity outside [0, 1], and RankError if even rank 1 is too large.
    """
    require_in_range("a rank", "sparsity", sparsity)
    m, n = shape
    if m + n >= m * n:
        return None
    # floor alone is wrong: (1 − 0.9) · 400 is 39.99… in float64.
    rank = math.floor((1 - sparsity) * m * n / (m + n) + 1e-9)
    if rank == 0:
        limit = math.floor((1 - (m + n) / (m * n)) * 1e4) / 1e4
        raise RankError(f"no rank makes a {m} × {n} matrix {sparsity:g} smaller; give a sparsity of at most {limit:g}")
    return rank


def require_in_range(name: str, unit: str, amount: float) -> None:
    """Raise LyapunovPruneError for an amount that no matrix can be compressed to."""
    right, given = {
        "sparsity": (0 <= amount <= 1, "a sparsity from 0 to 1"),
        "rank": (amount >= 1 and amount % 1 == 0, "a whole rank of 1 or more"),
        "bits": (amount in WIDTHS, "2 to 8 whole bits, or 1.58 for three values"),
    }[unit]
    if not right:
        raise LyapunovPruneError(f"{name} cannot take {unit} {amount:g}; give {given}")
