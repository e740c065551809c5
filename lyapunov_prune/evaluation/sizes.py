"""Sizes that were tried, each with its perplexity beside the dense model's, of which the smallest good one is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lyapunov_prune.results.axes import Per
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import MeasuredOn, Result
from lyapunov_prune.results.worth import GENTLE, GOOD, Ratio

_PerSize = Annotated[np.ndarray, Per("size", finite=False)]  # of a broken model


@dataclass(frozen=True)
class SizesTried(Result):
    """What was tried, the largest first: `bytes` of weights, and the perplexity as a multiple of the dense model's.

    `low` and `high` are the 95 % interval. `measured_on` is the text that decided; another one reports.
    """

    names: Annotated[tuple[str, ...], Per("size")]
    bytes: _PerSize
    ratio: _PerSize
    low: _PerSize
    high: _PerSize
    measured_on: MeasuredOn

    @classmethod
    def of(cls, rows: Sequence[tuple[str, int, Ratio]], on: MeasuredOn) -> SizesTried:
        """From name, bytes and ratio of each."""
        names, sizes, ratios = zip(*sorted(rows, key=lambda row: -row[1]), strict=True)
        value, low, high = np.array(ratios, np.float64).T
        return cls(names, np.array(sizes, np.float64), value, low, high, on)

    @property
    def taken(self) -> int | None:
        """The smallest whose interval ends at `GOOD` or below; None if none does."""
        good = np.flatnonzero(self.high <= GOOD)
        return int(good[-1]) if good.size else None

    def least(self) -> str:
        """The cost of the largest, which should be the gentlest."""
        return f"{self.names[0]}: {Ratio(self.ratio[0], self.low[0], self.high[0]).told()}"

    def to_frame(self) -> pd.DataFrame:
        good = [at == self.taken for at in range(len(self.names))]
        columns = {"size": self.names, "MB": self.bytes / 1e6, "perplexity ×": self.ratio}
        return pd.DataFrame({**columns, "low": self.low, "high": self.high, "taken": good})

    def answer(self) -> list[str]:
        told = f"no size that was tried costs {GENTLE}"
        if self.taken is not None:
            told = f"{self.names[self.taken]} is the smallest that costs {GENTLE}, by the upper end of the interval"
        return [f"Of {len(self.names)} sizes, {told}.", f"Decided on {self.measured_on.line()}"]
