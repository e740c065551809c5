"""The check of one bound: the worst of many inputs, and the margin for rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.linalg import require_numbers

# Relative rounding of a bound: the norm of a vector of up to 2¹³ entries, and a few products.
_ROUNDING = 2.0**-37
Numbers = npt.ArrayLike


@dataclass(frozen=True)
class BoundCheck:
    """One theorem checked on one matrix: the worst of `inputs` inputs, with the largest error / (bound + margin).

    `estimate` marks a bound whose hypothesis was only measured (growth along one trajectory, for example).
    """

    theorem: str
    matrix: str
    layer: int | None
    error: float
    bound: float
    margin: float  # u + v: allowance for rounding
    inputs: int
    estimate: bool = False

    @property
    def ratio(self) -> float:
        """Error / bound; 1 means that the bound is attained."""
        return self.error / self.bound if self.bound > 0 else (0.0 if self.error == 0 else np.inf)

    @property
    def holds(self) -> bool:
        return self.error <= self.bound + self.margin

    def __str__(self) -> str:
        verb = "holds for" if self.holds else "is VIOLATED by"
        numbers = f"error {self.error:.6g}, bound {self.bound:.6g} (± {self.margin:.2g})"
        return f"{self.theorem} {verb} {self.matrix}: {numbers}"

    def with_more(self, other: BoundCheck | None) -> BoundCheck:
        """Merge two checks of one theorem on one matrix: the worse of the two, with the inputs of both."""
        if other is None:
            return self
        worst = max(self, other, key=lambda c: (not c.holds, c.ratio))
        return replace(worst, inputs=self.inputs + other.inputs)


@dataclass(kw_only=True)
class Seen:
    """What was recorded of one matrix under one setting: the worst input, two probes, and hits of the cache.

    `check` is None where no input was recorded (an expert that no token reached). `probe` is Theorem 2 on the top right
    singular vector of the residual, `weight_probe` Theorem 1 on that of W, if there is a cache.
    """

    check: BoundCheck | None = None
    probe: BoundCheck | None = None
    weight_probe: BoundCheck | None = None
    hits: int = 0

    @property
    def checks(self) -> tuple[BoundCheck, ...]:
        return tuple(c for c in (self.check, self.probe, self.weight_probe) if c is not None)


def as_array(numbers: Numbers) -> np.ndarray:
    """A number or an array as (n,) float64."""
    return np.atleast_1d(np.asarray(numbers, dtype=np.float64))


class MatrixPlace(TypedDict, total=False):
    """What every checker takes beside its numbers: the `rounding` of the errors, and where they were measured."""

    rounding: Numbers
    matrix: str
    layer: int | None


def worst_check(
    theorem: str,
    error: Numbers,
    bound: np.ndarray,
    *,
    rounding: Numbers = 0.0,
    matrix: str = "",
    layer: int | None = None,
    estimate: bool = False,
) -> BoundCheck:
    """The check of the input with the largest error / (bound + margin). Raises LyapunovPruneError on NaN."""
    error, bound = np.broadcast_arrays(as_array(error), bound)
    if not len(error):
        raise LyapunovPruneError(f"{theorem} on {matrix}: no inputs to check")
    margin = np.broadcast_to(as_array(rounding), bound.shape) + _ROUNDING * bound
    for name, numbers in {"error": error, "bound": bound, "margin": margin}.items():
        require_numbers(numbers, f"{theorem} on {matrix}, {name}")
    with np.errstate(over="ignore"):  # an error above a bound of zero has ratio infinity
        share = error / np.maximum(bound + margin, np.finfo(np.float64).tiny)
    at = int(np.argmax(share))
    return BoundCheck(
        theorem=theorem,
        matrix=matrix,
        layer=layer,
        error=float(error[at]),
        bound=float(bound[at]),
        margin=float(margin[at]),
        inputs=len(error),
        estimate=estimate,
    )
