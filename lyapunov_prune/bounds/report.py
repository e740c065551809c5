"""What came of checking every matrix under every setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.decision import TokenCertificate
from lyapunov_prune.results.result import MeasuredOn, Result


@dataclass(frozen=True)
class Setting:
    """The three stages: share of entries removed, rank kept (None: all), radius of the cache as a share of ‖x‖."""

    sparsity: float
    rank: int | None
    cache_radius: float

    def __str__(self) -> str:
        return f"sparsity {self.sparsity:g}, rank {self.rank or 'full'}, cache radius {self.cache_radius:g}"

    @property
    def key(self) -> str:
        """Its name among finished jobs, with every digit: 0.5 and 0.50000001 print alike."""
        return f"sparsity {self.sparsity!r}, rank {self.rank or 'full'}, cache radius {self.cache_radius!r}"


@dataclass(frozen=True)
class Seen:
    """What one matrix did under one setting: the worst input, and the two probes (`approximate.Record`)."""

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

    `ratio` (K, M) is the largest error / bound of any token, NaN where none was seen (`unseen`: experts that a
    family fuses, weights that a module multiplies by itself, what took no part in the forward); `attained`
    (K, M) the same for the direction that the residual stretches most, near 1 when the bound is tight.
    `composition`, `contraction` and `decisions` come with a single setting only.
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
    contraction: tuple[BoundCheck, ...]
    gamma: float  # NaN when nothing was followed
    decisions: TokenCertificate | None
    measured_on: MeasuredOn

    @property
    def checks(self) -> int:
        """Matrices times settings."""
        return len(self.names) * len(self.settings)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Matrices whose inputs no one saw: their bounds are checked on the probe alone."""
        return tuple(name for name, row in zip(self.names, self.ratio.T, strict=True) if np.isnan(row).any())

    @property
    def passed(self) -> bool:
        certified = () if self.decisions is None else self.decisions.violations
        return not self.violations and not certified and all(c.holds for c in (*self.composition, *self.contraction))

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
        if self.unseen:
            lines.append(
                f"{len(self.unseen)} matrices, {self.unseen[0]} the first, were given no input in sight: their "
                "bounds are checked on one direction each, and on no token"
            )
        if self.composition:
            last = self.composition[-1]
            lines.append(
                f"After the last layer: error {last.error:.4g}, composed estimate {last.bound:.4g} "
                "(trajectory_error_le with growth measured along this trajectory, no worst case)"
            )
            lines += self._contraction_lines()
        if self.decisions is not None:
            lines.append(self.decisions.headline())
        return "\n".join(lines)

    def _contraction_lines(self) -> list[str]:
        geometric = [c for c in self.contraction if c.theorem == "lyapunov_contraction_bound"]
        layers = [str(c.layer) for c in self.contraction if c not in geometric]
        lines = [
            f"State outgrows error, with what the layer adds, in {len(layers)} of {len(self.composition)} layers"
            f"{' (' + ', '.join(layers) + ')' if layers else ''}: there the relative error must fall "
            "(residual_growth_contraction, measured)",
            f"Largest growth of the relative error γ = {self.gamma:.4g}: "
            + (
                f"worst relative error {geometric[0].error:.4g}, geometric estimate {geometric[0].bound:.4g} "
                "(lyapunov_contraction_bound, measured)"
                if geometric
                else "not below one, so that lyapunov_contraction_bound says nothing here"
            ),
        ]
        return lines + [f"VIOLATION: {c}" for c in (*self.composition, *self.contraction) if not c.holds]

    def summary(self) -> pd.DataFrame:
        """A line a component."""
        frame = self.to_frame().groupby("component", sort=False)
        columns: Any = {"matrices": ("matrix", "size"), "worst_ratio": ("worst_ratio", "max")}
        return frame.agg(**columns, attained=("attained", "min"), violations=("violations", "sum")).reset_index()
