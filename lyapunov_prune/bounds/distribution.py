"""The distribution of error / bound over all inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

QUANTILES = (0.0, 0.5, 0.99, 1.0)
EDGES = np.linspace(0, 1, 21)


@dataclass(frozen=True)
class RatioDistribution:
    """Error / bound of every input whose bound is above zero, float64; M matrices.

    The columns of `quantiles` (M, 4) and of `overall` (4,) are the minimum, the median, the 99 % quantile and the
    maximum, per matrix and over all matrices; NaN for a matrix without such an input (unchanged, or inputs not
    recorded). `counts` (21,) is the histogram over all matrices: ratios in `[k/20, (k + 1)/20)`, and in the last bin 1
    or above.
    """

    quantiles: np.ndarray
    overall: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, ratios: Sequence[np.ndarray]) -> RatioDistribution:
        """From the ratios of each matrix."""
        everything = np.concatenate([*ratios, np.zeros(0)])
        counts = np.histogram(everything, np.append(EDGES, np.inf))[0]
        return cls(np.stack([_quantiles(r) for r in ratios]), _quantiles(everything), counts.astype(np.int64))

    def columns(self) -> dict[str, np.ndarray]:
        """The quantiles of every matrix by name; the maximum is already reported as the worst ratio."""
        return dict(zip(("least", "median", "quantile_99"), self.quantiles.T, strict=False))

    def headline(self) -> str:
        least, median, most_of_them, largest = self.overall
        return (
            f"Error / bound of {self.counts.sum()} inputs with a bound above zero: least {least:.3g}, median "
            f"{median:.3g}, 99 % at most {most_of_them:.3g}, largest {largest:.3g}"
        )


def _quantiles(ratios: np.ndarray) -> np.ndarray:
    return np.quantile(ratios, QUANTILES) if len(ratios) else np.full(len(QUANTILES), np.nan)
