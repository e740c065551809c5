"""What came of checking every matrix under every setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lyapunov_prune.bounds import BoundCheck, TokenCertificate
from lyapunov_prune.results import MeasuredOn, Result


@dataclass(frozen=True)
class Setting:
    """The three stages: share of entries removed, rank kept (None: all), radius of the cache as a share of ‖x‖."""

    sparsity: float
    rank: int | None
    cache_radius: float

    def __str__(self) -> str:
        return f"sparsity {self.sparsity:g}, rank {self.rank or 'full'}, cache radius {self.cache_radius:g}"


@dataclass(frozen=True)
class Seen:
    """What one matrix did under one setting: the worst input, and the two probes (`approx.Record`)."""

    check: BoundCheck | None  # None for experts, whose inputs nobody sees
    probe: BoundCheck | None
    weight_probe: BoundCheck | None
    hits: int

    @property
    def checks(self) -> tuple[BoundCheck, ...]:
        return tuple(c for c in (self.check, self.probe, self.weight_probe) if c is not None)


@dataclass(frozen=True)
class Violation:
    setting: Setting
    check: BoundCheck


@dataclass(frozen=True)
class BoundsReport(Result):
    """What came of checking every matrix (M) under every setting (K).

    `ratio` (K, M) is the largest error / bound of any token, NaN where none was seen (experts that a family
    fuses); `attained` (K, M) the same for the direction that the residual stretches most, near 1 when the
    bound is tight. `composition` and `decisions` come with a single setting only.
    """

    method: str
    settings: tuple[Setting, ...]
    names: tuple[str, ...]
    components: tuple[str, ...]
    layers: tuple[int, ...]
    theorems: tuple[str, ...]  # checked, of Theorems 1 to 4
    ratio: np.ndarray
    attained: np.ndarray
    hits: int  # inputs answered by the cache, over all matrices
    inputs: int  # inputs checked, over all matrices
    violations: tuple[Violation, ...]
    composition: tuple[BoundCheck, ...]
    decisions: TokenCertificate | None
    measured_on: MeasuredOn

    @property
    def checks(self) -> int:
        """Matrices times settings."""
        return len(self.names) * len(self.settings)

    @property
    def passed(self) -> bool:
        certified = () if self.decisions is None else self.decisions.violations
        return not self.violations and not certified and all(c.holds for c in self.composition)

    def to_frame(self) -> pd.DataFrame:
        """One row a matrix, the worst over all settings."""
        bad = [v.check.matrix for v in self.violations]
        return pd.DataFrame(
            {
                "matrix": self.names,
                "layer": self.layers,
                "component": self.components,
                "worst_ratio": np.fmax.reduce(self.ratio, axis=0),
                "attained": np.fmax.reduce(self.attained, axis=0),
                "violations": [bad.count(name) for name in self.names],
            }
        )

    def headline(self) -> str:
        lines = [
            f"Bounds: {len(self.names)} matrices × {len(self.settings)} settings = {self.checks} checks on "
            f"{self.inputs} inputs, {len(self.violations)} violations ({', '.join(self.theorems)})",
            self.measured_on.line(),
        ]
        lines += [f"VIOLATION at {v.setting}: {v.check}" for v in self.violations]
        if self.composition:
            last = self.composition[-1]
            lines.append(
                f"After the last layer: error {last.error:.4g}, composed estimate {last.bound:.4g} "
                "(trajectory_error_le with growth measured along this trajectory, no worst case)"
            )
        if self.decisions is not None:
            lines.append(self.decisions.headline())
        return "\n".join(lines)

    def summary(self) -> pd.DataFrame:
        """A line a component."""
        frame = self.to_frame().groupby("component", sort=False)
        columns: Any = {"matrices": ("matrix", "size"), "worst_ratio": ("worst_ratio", "max")}
        return frame.agg(**columns, attained=("attained", "min"), violations=("violations", "sum")).reset_index()
