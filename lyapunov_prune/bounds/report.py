"""The result of checking every matrix under every setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lyapunov_prune.bounds.alignment import LayerAlignment
from lyapunov_prune.bounds.bound_check import BoundCheck
from lyapunov_prune.bounds.decision import TokenCertificate
from lyapunov_prune.bounds.growth import TwoPhases
from lyapunov_prune.models.roles import LeftAlone, left_alone_lines
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.result import LINES, MeasuredOn, ModelIdentity, Result

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


WRITTEN = "as written"  # the method of a checkpoint, if the caller does not name one


@dataclass(frozen=True)
class Setting:
    """One setting: share of entries removed, rank kept (None: all), cache radius relative to ‖x‖."""

    sparsity: float
    rank: int | None
    cache_radius: float

    def __str__(self) -> str:
        return f"sparsity {self.sparsity:g}, rank {self.rank or 'full'}, cache radius {self.cache_radius:g}"

    @property
    def key(self) -> str:
        """The key of this setting among finished jobs, with all digits (0.5 and 0.50000001 print alike)."""
        return f"sparsity {self.sparsity!r}, rank {self.rank or 'full'}, cache radius {self.cache_radius!r}"


@dataclass(frozen=True)
class Violation:
    setting: Setting | None  # None for a checkpoint
    check: BoundCheck

    def __str__(self) -> str:
        return f"VIOLATION{f' at {self.setting}' if self.setting else ''}: {self.check}"


@dataclass(frozen=True)
class BoundsReport(Result):
    """The result of checking every matrix (M) under every setting (K), or the matrices of a checkpoint (K = 1).

    The inputs are those of the approximated model, including its errors; for a checkpoint, those of its own forward.
    `compressed` names the checkpoint, and `settings` is then empty; `shared` are its embeddings (and head) that differ,
    which both models then ran with. `ratio` (K, M) is the largest error / bound of any token, NaN where no input was
    recorded (`unseen`: experts that no token reached, modules that did not run). `attained` (K, M) is the same for the
    top right singular vector of the residual, near 1 when the bound is tight. `composition`, `contraction`,
    `decisions`, `distribution`, `alignment` and `phases` exist for a single setting or a checkpoint.
    """

    method: str
    settings: tuple[Setting, ...]
    names: tuple[str, ...]
    components: tuple[str, ...]
    layers: tuple[int, ...]
    theorems: tuple[str, ...]  # the checked ones of Theorems 1 to 4
    ratio: np.ndarray
    attained: np.ndarray
    hits: int  # inputs that the cache answered, over all matrices
    inputs: int  # inputs checked, over all matrices
    violations: tuple[Violation, ...]
    measured_on: MeasuredOn  # the dense model
    composition: tuple[BoundCheck, ...] = ()
    contraction: tuple[BoundCheck, ...] = ()
    gamma: float = np.nan  # NaN when the states were not followed
    decisions: TokenCertificate | None = None
    compressed: ModelIdentity | None = None
    distribution: RatioDistribution | None = None
    alignment: LayerAlignment | None = None
    phases: TwoPhases | None = None
    shared: tuple[str, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()  # weights inside the layers that have no bound

    @property
    def checks(self) -> int:
        """Number of matrices times settings."""
        return self.ratio.size

    @property
    def unseen(self) -> tuple[str, ...]:
        """Matrices whose inputs could not be recorded; their bounds are checked on the probes alone."""
        return tuple(name for name, row in zip(self.names, self.ratio.T, strict=True) if np.isnan(row).any())

    @property
    def passed(self) -> bool:
        certified = () if self.decisions is None else self.decisions.violations
        return not self.violations and not certified and all(c.holds for c in self._estimates)

    @property
    def _estimates(self) -> tuple[BoundCheck, ...]:
        """Checks of theorems whose hypothesis was only measured."""
        return (*self.composition, *self.contraction, *(self.alignment.checks if self.alignment else ()))

    def to_frame(self) -> pd.DataFrame:
        """One row per matrix, with the worst ratio over all settings."""
        bad = [v.check.matrix for v in self.violations]
        spread = {} if self.distribution is None else self.distribution.columns()
        return pd.DataFrame(
            {
                "matrix": self.names,
                "layer": self.layers,
                "component": self.components,
                **spread,
                "worst_ratio": np.fmax.reduce(self.ratio, axis=0),
                "attained": np.fmax.reduce(self.attained, axis=0),
                "violations": [bad.count(name) for name in self.names],
            }
        )

    def answer(self) -> list[str]:
        """Whether every bound held, and how close the closest came."""
        worst = np.fmax.reduce(self.ratio, axis=0)
        broken = [*self.violations, *(c for c in self._estimates if not c.holds)]
        lines = [
            f"Every bound held: {self.checks} checks of {len(self.names)} matrices on {self.inputs} inputs."
            if self.passed
            else f"VIOLATED: {len(broken) or 'some'} bounds of {self.checks} checks on {self.inputs} inputs.",
            *map(str, broken[:3]),
        ]
        if np.isfinite(worst).any():
            at = int(np.nanargmax(worst))
            lines.append(f"Nearest to its bound: {self.names[at]}, an error of {worst[at]:.3g} of what is allowed.")
        if self.unseen:
            lines.append(f"{len(self.unseen)} matrices were given no input in sight: one direction each was checked.")
        lines += left_alone_lines(self.left_alone)
        lines.append(
            "A check speaks of the inputs it saw; it does not say that the model is good: score it with eval."
            if self.passed
            else "A theorem does not fail: the checkpoint or this program does. Report it with bounds.json."
        )
        return [*lines[: LINES - 1], self.measured_on.line()]

    def headline(self) -> str:
        name = self.compressed.name if self.compressed else ""
        made = f"as {name} holds them" if self.method == WRITTEN else f"of {name} by {self.method}"
        subject = (
            f"{len(self.names)} matrices × {len(self.settings)} settings = {self.checks} checks on {self.inputs} inputs"
            if self.compressed is None
            else f"{len(self.names)} matrices {made}, {self.inputs} inputs of its forward"
        )
        lines = [
            f"Bounds: {subject}, {len(self.violations)} violations ({', '.join(self.theorems)})",
            self.measured_on.line(),
        ]
        if self.shared:
            lines.append(f"Both models run with {' and '.join(self.shared)} of the compressed one")
        lines += map(str, self.violations)
        if self.distribution is not None:
            lines.append(self.distribution.headline())
        if self.unseen:
            lines.append(
                f"{len(self.unseen)} matrices, {self.unseen[0]} the first, have no recorded input: their "
                "bounds are checked on one direction each, and on no token"
            )
        if self.composition:
            last = self.composition[-1]
            lines.append(
                f"After the last layer: error {last.error:.4g}, composed estimate {last.bound:.4g} "
                "(trajectory_error_le with growth measured along this trajectory, no worst case)"
            )
            lines += self._contraction_lines()
        if self.phases is not None:
            lines.append(f"{self.phases.line()} (derived from trajectory_error_le, measured)")
        if self.alignment is not None:
            lines.append(self.alignment.headline())
        lines += [f"VIOLATION: {c}" for c in self._estimates if not c.holds]
        if self.decisions is not None:
            lines.append(self.decisions.headline())
        return "\n".join(lines)

    def _contraction_lines(self) -> list[str]:
        geometric = [c for c in self.contraction if c.theorem == "lyapunov_contraction_bound"]
        layers = [str(c.layer) for c in self.contraction if c not in geometric]
        return [
            f"State outgrows error, including the layer's own, in {len(layers)} of {len(self.composition)} layers"
            f"{' (' + ', '.join(layers) + ')' if layers else ''}: there the relative error must fall "
            "(residual_growth_contraction, measured)",
            f"Largest growth of the relative error γ = {self.gamma:.4g}: "
            + (
                f"worst relative error {geometric[0].error:.4g}, geometric estimate {geometric[0].bound:.4g} "
                "(lyapunov_contraction_bound, measured)"
                if geometric
                else "not below one, so lyapunov_contraction_bound does not apply"
            ),
        ]

    def summary(self) -> pd.DataFrame:
        """One row per component."""
        frame = self.to_frame()
        columns: Any = {"matrices": ("matrix", "size")}
        if self.distribution is not None:
            columns |= {"least": ("least", "min"), "median": ("median", "median")}
        columns |= {"worst_ratio": ("worst_ratio", "max"), "attained": ("attained", "min")}
        columns |= {"violations": ("violations", "sum")}
        return frame.groupby("component", sort=False).agg(**columns).reset_index()
